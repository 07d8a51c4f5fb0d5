"""Thin absl programs over cocodc_jax."""
