"""Whole jobs with random faults, and whether they went on as if nothing had happened."""
