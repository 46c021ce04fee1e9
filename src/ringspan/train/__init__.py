"""Training a LongNet over a data x ring mesh: what `ringspan train` runs. Small enough to read, and to copy."""
