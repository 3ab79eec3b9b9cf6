"""What driver, slots and trainings say to each other: typed, versioned, free of Parsl and torch."""
