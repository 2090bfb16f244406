"""Asks the model which batch serves it exactly; nothing is served that was not proved at load."""
