"""Scripts of other training libraries, moved to distir-relax."""
