"""The upstream symbols that the CPU device replaces, one module each."""
