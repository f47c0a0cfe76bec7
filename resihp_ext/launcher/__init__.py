"""Starts the ranks of a job and turns the way they ended into an exit code and one line."""
