"""Windows of PBS."""
