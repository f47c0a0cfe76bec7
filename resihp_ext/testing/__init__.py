"""What tests and benchmarks share: real processes, quickly started and always ended."""
