"""Checks of the exercises of notebook 10, one module for each, and what several of them share."""
