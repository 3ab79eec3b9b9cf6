"""The messages between driver, slots and trainings: typed, versioned, independent of Parsl and torch."""
