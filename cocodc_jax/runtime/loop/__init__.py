"""The loop around a program: records, clock, evaluation, checkpoints."""
