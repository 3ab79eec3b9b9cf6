"""The jobs that the driver holds, and what it learns about them."""
