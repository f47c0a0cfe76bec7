"""Waits out the time that a large model would take on devices that are not there."""
