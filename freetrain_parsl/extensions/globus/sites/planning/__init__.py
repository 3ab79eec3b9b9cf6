"""Several sites: which training job runs where."""
