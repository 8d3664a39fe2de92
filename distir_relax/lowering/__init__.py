"""What each rank does, in what order: DistIR, tail blocks, projection, emission, bundles."""

from distir_relax.lowering.fuse import FuseLocal, as_ranks_run
from distir_relax.lowering.project import Project, project
from distir_relax.lowering.to_distir import ToDistIR

__all__ = ["FuseLocal", "Project", "ToDistIR", "as_ranks_run", "project"]
