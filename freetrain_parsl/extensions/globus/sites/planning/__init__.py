"""Several sites: which training runs where."""
