"""Everything a question may say, once: each key is a flag of ``resihp plan`` and a key of its file.

Imports nothing, so that ``resihp --help`` answers at once.
"""

from __future__ import annotations

from typing import NamedTuple


class Key(NamedTuple):
    """One setting, the same on the command line and in a file."""

    name: str
    """As a flag without its dashes, and in files."""
    form: str
    """What a value looks like; empty for a switch."""
    default: str
    """For people."""
    meaning: str
    many: bool = False
    """Whether it may be given several times."""


MODEL_KEYS = (
    Key("layers", "N", "the model's", "Layers."),
    Key("hidden", "N", "the model's", "Hidden size."),
    Key("ffn", "N", "the model's", "Channels of the feed-forward network."),
    Key("heads", "N", "the model's", "Attention heads."),
    Key("query-groups", "N", "the model's, else the heads", "Heads of keys and values."),
    Key("vocab", "N", "the model's", "Words; rounded up to a multiple of 384."),
    Key("seq-length", "N", "the model's, else 8192", "Tokens of a sequence."),
    Key("micro-batch-size", "N", "the model's, else 1", "Sequences of a micro-batch."),
)
"""Sizes of a model: flags that override them, and what a file of a model holds."""

KEYS = (
    Key("nodes", "N", "as few as the layout needs", "Nodes."),
    Key("devices-per-node", "N", "8", "Devices of a node."),
    Key("tp", "N", "1", "Tensor-parallel degree of every stage."),
    Key("pp", "N", "1", "Stages."),
    Key("dp", "N", "as many as fit", "Replicas."),
    Key("model", "NAME|FILE", "", "Known model, or a YAML file of sizes."),
    *MODEL_KEYS,
    Key("micro-batches", "N", "4 x pp x dp", "Micro-batches of a global batch, a multiple of dp."),
    Key("hardware", "NAME|FILE", "h100", "a100, h100, h200, cpu, or a file of resihp profile."),
    Key("memory-gb", "GB", "nine tenths of a device", "What a device has for the job, in 10^9 B."),
    Key("sharded-optimizer", "", "off", "Replicas share the optimizer's state."),
    Key("sequence-parallel", "", "off", "Sequence parallelism in every TP group."),
    Key("recompute", "", "off", "Keep only the inputs of layers."),
    Key("planner", "NAME", "joint", "joint, or progressive: the paper's."),
    Key("lifetime-s", "S", "1800", "How long the new plan is expected to last."),
    Key("dead", "RANKS", "none", "Dead devices: 3 or 3,9-11.", many=True),
    Key("slow", "RANKS:P", "none", "Slow ones and their speed: 7:0.5 or 8-11:0.8.", many=True),
)

NAMES = tuple(key.name for key in KEYS)
