"""Stand-ins of Globus' web services on the loopback interface, for tests without an account."""
