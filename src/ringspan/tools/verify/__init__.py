"""`ringspan verify`: checks that an attention function over a ring is exact, sharded and fast.

``run`` starts the ranks and lists all checks; each family of checks (``exactness``, ``traffic``, ``memory``, ``speed``)
is one file with what a rank measures and how that is judged.
"""
