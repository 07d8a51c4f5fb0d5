"""Compares methods over emulated networks with the simulator's predictions."""
