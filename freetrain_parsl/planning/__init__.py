"""Planning as pure functions: no clock, no I/O, no Parsl, no torch."""
