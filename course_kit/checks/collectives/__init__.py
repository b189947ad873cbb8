"""Checks of the exercises of notebook 03, one module for each, and what several of them share."""
