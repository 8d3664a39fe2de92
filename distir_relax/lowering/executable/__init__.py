"""The executable stage: what a rank computes once and in each call, packed weights, and the memory of results."""
