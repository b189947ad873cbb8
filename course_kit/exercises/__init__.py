"""Exercises as functions of the library: read a cell, splice it into a module, install it while Python runs.

Nothing here imports PyTorch: the export and the launcher use it on machines that have none.
"""
