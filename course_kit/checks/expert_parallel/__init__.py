"""Checks of notebook 08, one module for each exercise, and what they share."""
