"""Labs and measurements of the notebooks: what a cell shows and a check judges runs here, with the same seed."""
