"""`ringspan bench`: speed, memory and longest sequence, by length and ring size, next to other implementations."""
