"""Rehearsal: one rank of a ring that is not there, run for real, with parcels from a stand-in."""
