"""Everything that touches Megatron. ``megatron`` itself is a namespace and has no ``__init__``."""
