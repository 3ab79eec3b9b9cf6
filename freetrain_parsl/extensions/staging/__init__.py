"""Nodes start from an image of the Python environment on their own storage, not from the shared file system."""
