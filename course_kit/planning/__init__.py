"""Accuracy of the planner of notebook 11: published runs, fits to them, and the regret of its picks."""
