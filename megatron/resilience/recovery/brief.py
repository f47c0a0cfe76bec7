"""Tells the coordinator about model and devices, so that it can plan."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import torch

from megatron.resilience.device.choose import Device
from megatron.resilience.device.host_memory import total_bytes
from megatron.resilience.executor.start import Planned
from megatron.resilience.settings import Settings
from megatron.resilience.upstream.policy import policy_of
from resihp_ext.cost.cluster import UNCOUNTED
from resihp_ext.cost.model_shape import ModelShape


def brief(args: argparse.Namespace, layout: Planned, device: Device, settings: Settings) -> str:
    """JSON for the planner.

    Args:
        args: Megatron's arguments.
    """
    shape = ModelShape(
        name="job",
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        attention_heads=args.num_attention_heads,
        query_groups=args.num_query_groups or args.num_attention_heads,
        vocab_size=args.padded_vocab_size,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        gated=bool(args.swiglu),
        tied=not args.untie_embeddings_and_output_weights,
        qkv_bias=bool(args.add_bias_linear or args.add_qkv_bias),
    )
    policy = policy_of(args, sequence_parallel=layout.sequence_parallel)
    scene = settings.emulation.read()
    return json.dumps(
        {
            "shape": asdict(shape),
            "policy": asdict(policy),
            "hardware": _hardware(device) if scene is None else scene.cost.name,
            "emulated": None if scene is None else asdict(scene.shape),
            "memory_bytes": _memory_bytes(device, layout.rank.local_world_size),
            "nominal": layout.timetable[0].plan.to_json(),
            "act": asdict(settings.act) if settings.timing.detect == "act" else None,
            "last_step": args.train_iters or 0,
        },
        sort_keys=True,
    )


def _hardware(device: Device) -> str:
    """The preset of costs that comes closest."""
    if device.kind == "cpu":
        return "cpu"
    known = ("a100", "h100", "h200")
    return next((name for name in known if name in device.name.lower()), "h100")


def _memory_bytes(device: Device, ranks: int) -> int:
    """What a rank may use: its GPU's memory, or its share of the host's."""
    if device.kind == "cpu":
        whole = total_bytes() // ranks
    else:
        whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return whole - whole // UNCOUNTED
