"""Transports between ranks: MPI, torch.distributed, threads of one process."""
