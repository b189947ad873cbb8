"""Checks of the exercises of notebook 13, one module for each, and what several of them share."""
