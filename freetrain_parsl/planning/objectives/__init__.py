"""What an allocation is worth."""
