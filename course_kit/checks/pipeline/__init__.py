"""Checks of the exercises of notebook 09, one module for each, and what several of them share."""
