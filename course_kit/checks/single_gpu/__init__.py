"""Checks of notebook 01, one module for each exercise, and what they share."""
