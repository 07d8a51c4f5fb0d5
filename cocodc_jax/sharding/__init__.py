"""Where arrays of a run are placed: meshes, sharding rules, transfers."""
