"""What all control messages are made of.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Rank = Annotated[int, Meta(ge=0, lt=2**20)]
Count = Annotated[int, Meta(ge=0, lt=2**53)]
Name = Annotated[str, Meta(max_length=64)]
Line = Annotated[str, Meta(max_length=1000)]
Text = Annotated[str, Meta(max_length=2**24)]
Raw = Annotated[bytes, Meta(max_length=2**24)]
Ranks = Annotated[tuple[Rank, ...], Meta(max_length=2**20)]
Figures = Annotated[tuple[float, ...], Meta(max_length=64)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is sent; the class's tag says which it is."""
