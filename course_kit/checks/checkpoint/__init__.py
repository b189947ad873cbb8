"""Checks of the exercises of notebook 10b, one module for each."""
