"""Measured runs that others published, for the planner of notebook 11 to be held against."""
