"""Regions that come and go: membership, messages, decisions."""
