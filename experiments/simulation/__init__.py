"""Parts of `experiments.simulate`: its flags, and what they describe."""
