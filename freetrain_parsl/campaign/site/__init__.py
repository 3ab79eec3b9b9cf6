"""The site file, and the machine that it describes."""
