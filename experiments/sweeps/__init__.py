"""What `experiments.sweep` is made of: grids, halving, rows, and what they come to."""
