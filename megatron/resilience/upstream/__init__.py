"""The adapter room: the only place that touches Megatron's global arguments and parallel state."""
