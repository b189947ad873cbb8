"""Checks of the exercises of notebook 04, one module for each, and what several of them share."""
