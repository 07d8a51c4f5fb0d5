"""Studies that were run once; their results are in `experiments/results`."""
