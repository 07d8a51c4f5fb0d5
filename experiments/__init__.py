"""Thin absl programs over cocodc_jax; `commands` tells how each is called."""
