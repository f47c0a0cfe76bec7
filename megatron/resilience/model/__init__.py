"""Modules of our own inside Megatron's layers, and the weights a model starts from."""
