"""The methods on devices: meshes, inner steps, exchange, the loop, checkpoints."""
