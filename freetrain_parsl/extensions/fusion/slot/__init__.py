"""An array in a slot."""
