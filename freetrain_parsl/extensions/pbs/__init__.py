"""Windows on PBS."""
