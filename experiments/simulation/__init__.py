"""Parts of `experiments.simulate`: flags, the network they describe, stages."""
