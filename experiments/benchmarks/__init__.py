"""What `experiments.bench` measures: cases, contenders, and how turns are timed."""
