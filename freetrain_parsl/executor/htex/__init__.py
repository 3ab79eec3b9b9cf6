"""The processes of HTEX as this executor starts them: interchange, worker pools."""
