"""Checks of notebook 06, one module for each exercise, and what they share."""
