"""Checkpoint safety: which checkpoint a job may start from, decided before anything is loaded.

``verify`` finds damage in one checkpoint, ``choose`` picks the newest sound one, ``agree`` makes
all ranks take the same one. None of it imports Megatron or torch, and nothing unpickles with the
standard unpickler.
"""
