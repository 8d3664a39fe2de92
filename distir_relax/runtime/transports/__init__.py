"""How ranks reach each other: MPI, torch.distributed, threads of one process."""
