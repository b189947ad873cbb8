"""Checks of notebook 02, one module for each exercise, and what they share."""
