"""The tvm backend: a rank's program runs on TVM's virtual machine."""

from distir_relax.runtime.backends.tvm.program import TvmProgram, load, rank_function

__all__ = ["TvmProgram", "load", "rank_function"]
