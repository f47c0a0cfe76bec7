"""Finds slow devices and links, and no phantoms; pure, no torch."""
