"""`ringspan verify --training`: checks that a training step over a ring of k processes is that of one process.

``adapter`` is what a user writes; ``steps`` takes the same ``batches`` on each ring; ``compare`` measures how far they
are from one process; ``judge`` turns that into checks; ``training_page`` is the report.
"""
