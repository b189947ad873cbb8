"""Checks of the exercises of notebook 11, one module for each."""
