"""What a plan costs: seconds of its actions, bytes of its ranks. Neither torch nor Megatron."""
