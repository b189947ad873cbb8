"""Checks of the exercises of notebook 05, one module for each, and what several of them share."""
