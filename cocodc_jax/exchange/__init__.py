"""Means over regions: inside compiled programs, between processes, between jobs."""
