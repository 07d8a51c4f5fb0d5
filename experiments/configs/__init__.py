"""Presets, each a lab note."""
