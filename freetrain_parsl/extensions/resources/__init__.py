"""Jobs that need several kinds of resources, in combinations of workers and parameter servers."""
