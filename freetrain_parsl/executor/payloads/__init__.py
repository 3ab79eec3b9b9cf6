"""What travels between driver and slots: calls, code, modules, values, and where it is found."""
