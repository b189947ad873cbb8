"""Figures and widgets of the notebooks, drawn with matplotlib and ipywidgets."""
