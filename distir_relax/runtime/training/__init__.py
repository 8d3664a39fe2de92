"""Training of a bundle: ranks, data, checkpoints, and the training loop."""
