"""Import of torch modules, ONNX files and Relax modules; each frontend returns an `Imported`."""
