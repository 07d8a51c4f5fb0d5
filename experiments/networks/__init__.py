"""Methods over emulated networks, beside what the simulator says of them."""
