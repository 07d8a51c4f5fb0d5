"""What `experiments.chaos` is made of: flags, faults in the lab, what records say."""
