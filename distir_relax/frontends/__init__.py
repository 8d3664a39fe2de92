"""Models in: torch modules, ONNX files, Relax modules; each gives an `Imported`."""
