"""HTEX's processes as this executor starts them: the interchange and the worker pools."""
