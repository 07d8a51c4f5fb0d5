"""Parts of `experiments.bench`: cases, contenders, and the timing of turns."""
