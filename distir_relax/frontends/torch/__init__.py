"""Import of PyTorch models."""

from distir_relax.frontends.torch.importer import import_torch

__all__ = ["import_torch"]
