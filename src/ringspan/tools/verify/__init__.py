"""`ringspan verify`: checks that an attention function over a ring is exact, sharded and fast. One file per check."""
