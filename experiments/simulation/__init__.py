"""What `experiments.simulate` is made of: flags, what they describe, stages."""
