"""The ResiHP engine: knows ranks, layouts, plans and messages, and imports no Megatron."""

__version__ = "0.1.0"
