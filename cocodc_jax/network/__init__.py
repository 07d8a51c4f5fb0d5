"""Link model, cost of collectives, timeline simulator and planner.

Pure Python and NumPy; knows nothing of devices or of the rest of the package.
"""
