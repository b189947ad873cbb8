"""Checks of the exercises of notebook 14b, one module for each."""
