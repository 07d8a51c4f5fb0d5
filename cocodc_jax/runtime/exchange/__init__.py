"""How fragments leave the regions, cross, and become outer parameters."""
