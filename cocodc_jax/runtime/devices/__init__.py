"""Meshes, where every array lies, and how values move between devices."""
