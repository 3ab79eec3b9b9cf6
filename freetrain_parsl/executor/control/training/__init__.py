"""The life of one training as a state machine: typed events in, typed commands out, no clock, no thread, no socket."""
