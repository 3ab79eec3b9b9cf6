"""How throughput grows with nodes."""
