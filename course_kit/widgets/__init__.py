"""Controls that redraw a figure, and the progress bars of slow cells."""
