"""The version, read by the build back end without importing the package."""

__version__ = "0.1.0.dev0"
