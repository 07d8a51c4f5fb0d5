"""The ablation of delay compensations: many small runs side by side on one core."""
