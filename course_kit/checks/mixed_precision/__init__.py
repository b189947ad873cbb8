"""Checks of the exercises of notebook 14, one module for each, and what several of them share."""
