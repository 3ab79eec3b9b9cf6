"""The life of one job as a pure state machine: typed events in, typed commands out; no clock, threads or I/O."""
