"""Training a bundle: the ranks, their data, their checkpoints, and the steps."""
