"""`ringspan verify --acceptance`: everything that a new machine must show, in isolated steps, in one report.

``run`` plans the steps and runs each in processes of its own (`steps`). ``tasks`` are the steps that no other command
runs: what a process measures and writes. ``judge`` turns what was written into checks, and ``acceptance_page`` into the
report. ``tiles`` compares one kernel with the definition in fp64, here and in the tests.
"""
