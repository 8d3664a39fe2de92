"""What each rank does, in what order: DistIR, tail blocks, projection, emission, bundles."""

from distir_relax.lowering.fuse import FuseLocal
from distir_relax.lowering.project import Project, project
from distir_relax.lowering.to_distir import ToDistIR

__all__ = ["FuseLocal", "Project", "ToDistIR", "project"]
