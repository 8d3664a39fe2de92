"""Small configurations of other people's models, and one trial of each: what `benchmarks/coverage.py` runs."""
