"""Is the ring real? What `ringspan verify` asks of an attention over a ring, and how it comes to its verdicts."""
