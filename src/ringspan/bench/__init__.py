"""`ringspan bench`: speed, memory and longest length, over lengths and ring sizes, with other implementations beside.

A *case* says what is measured, a *trial* is one measurement of it in fresh processes, and a *ladder* is all lengths of
one implementation: it is climbed from the shortest on, and left at the first length that does not run.
"""
