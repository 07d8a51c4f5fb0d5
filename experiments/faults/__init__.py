"""Parts of `experiments.chaos`: flags, faults in the lab, checks of the records."""
