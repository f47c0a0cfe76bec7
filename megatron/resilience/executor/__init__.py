"""Runs a plan: groups, modules, gradients and transfers of one rank, on unmodified Megatron."""
