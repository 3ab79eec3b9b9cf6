"""The messages between driver, slots and training jobs: typed, versioned, independent of Parsl and torch."""
