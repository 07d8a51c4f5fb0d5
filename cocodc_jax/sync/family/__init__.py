"""The methods, by what they have in common; `sync/methods.py` lists them."""
