"""Parts of `experiments.sweep`: grids, halving, rows, cells and reports."""
