"""Labs and measurements of the notebooks: cells and checks run the same code here, with the same seed."""
