"""The systems that are compared, one a file."""
