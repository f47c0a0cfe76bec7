"""``resihp profile`` itself: which degrees, the ranks, the fits, the table and the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from megatron.resilience.device.choose import Device, DeviceConfig, choose_device
from megatron.resilience.profile.fit import fit_layer, fit_link, mixes
from megatron.resilience.profile.request import (
    PRELOAD,
    Request,
    Times,
    measure_link,
    measure_model,
)
from resihp_ext.cost.layer_cost import MeasuredLayer
from resihp_ext.cost.link import Link
from resihp_ext.cost.model_shape import MODELS, ModelShape
from resihp_ext.cost.presets import FIGURES, Figures
from resihp_ext.cost.profile_file import Profile
from resihp_ext.errors import UserError
from resihp_ext.testing.ranks import preload, run_ranks

MESSAGE_BYTES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23)
LARGEST_TP = 8
TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the user asked for."""

    out: Path
    model: str = "tiny"
    seq_length: int | None = None
    """Default: the model's own."""
    tps: tuple[int, ...] = ()
    """Default: every degree that the model allows and the machine has devices for, up to 8."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    quick: bool = False


def profile(options: Options, say: Callable[[str], None]) -> Profile:
    """Measures this machine, says a table line by line, writes the file.

    Raises:
        UserError: options that cannot be met; before anything is measured.
    """
    shape = _shape(options)
    device = choose_device(
        DeviceConfig(device=options.device),
        gpu_count=torch.cuda.device_count(),
        gpu_name=torch.cuda.get_device_name(0) if torch.cuda.device_count() else "",
    )
    count = torch.cuda.device_count() if device.kind == "cuda" else len(os.sched_getaffinity(0))
    tps = _degrees(options, shape, count)
    _check_writable(options.out)
    request = Request(
        shape=shape,
        batches=mixes(shape.tokens, quick=options.quick),
        kind=device.kind,
        backend=device.backend,
        budget_s=1.5 if options.quick else 8.0,
    )
    preload(PRELOAD)
    say(f"{device.name}, {shape.name}, micro-batches of {shape.tokens} tokens")
    measured = {tp: run_ranks(tp, measure_model, request, timeout_s=TIMEOUT_S) for tp in tps}
    found = _profile(request, device, measured, _link(request, count))
    for line in table(found):
        say(line)
    options.out.write_text(found.to_json(), encoding="utf-8")
    say(f"wrote {options.out}")
    return found


def _shape(options: Options) -> ModelShape:
    if options.model not in MODELS:
        raise UserError(f"--model {options.model}: choose one of {', '.join(MODELS)}")
    shape = MODELS[options.model]
    if options.seq_length is None:
        return shape
    if options.seq_length < 32 or options.seq_length % 32:
        raise UserError(f"--seq-length {options.seq_length}: must be a positive multiple of 32")
    return replace(shape, seq_length=options.seq_length)


def _degrees(options: Options, shape: ModelShape, count: int) -> tuple[int, ...]:
    if not options.tps:
        limit = min(count, 2 if options.quick else LARGEST_TP)
        return shape.valid_tps(limit)
    for tp in options.tps:
        if problem := shape.problem_with_tp(tp):
            raise UserError(f"--tp {tp}: {shape.name}: {problem}")
        if tp > count:
            raise UserError(f"--tp {tp}: this machine has {count} device(s) to run it on")
    return tuple(sorted(set(options.tps)))


def _check_writable(path: Path) -> None:
    problem = None
    if path.is_dir():
        problem = "is a directory"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = f"cannot write {'it' if path.exists() else f'into {path.parent}'}"
    if problem:
        raise UserError(f"--out {path}: {problem}; name a file in a directory that exists")


def _link(request: Request, count: int) -> tuple[Link, float | None]:
    """The link between two devices and the MAPE of its fit; published figures for one device."""
    if count < 2:
        return _published(request.kind).inside, None
    runs = run_ranks(2, measure_link, request, MESSAGE_BYTES, timeout_s=TIMEOUT_S)
    return fit_link(MESSAGE_BYTES, runs[0])


def _published(kind: str) -> Figures:
    """Figures of the present kind of GPU, as far as they are known."""
    if kind == "cpu":
        return FIGURES["cpu"]
    name = torch.cuda.get_device_name(0).lower()
    return next((FIGURES[key] for key in ("h200", "h100", "a100") if key in name), FIGURES["a100"])


def _profile(
    request: Request,
    device: Device,
    measured: dict[int, list[Times]],
    link: tuple[Link, float | None],
) -> Profile:
    layers, errors = {}, {}
    for tp, ranks in measured.items():
        layers[tp], errors[str(tp)] = _layer(request, ranks)
    published = _published(request.kind)
    step_s = [times.step_parameter_s for ranks in measured.values() for times in ranks]
    return Profile(
        device=device.name,
        shape=request.shape,
        layers=layers,
        inside=link[0],
        between=link[0],
        step_parameter_s=max(step_s),
        element_bytes=published.element_bytes,
        fixed_transition_s=published.fixed_transition_s,
        notes={
            "mape_percent": errors,
            "rounds": {str(tp): ranks[0].rounds for tp, ranks in measured.items()},
            "link_mape_percent": link[1],
            "assumed": [
                "between: the same as inside, for want of a second machine",
                "fixed_transition_s",
                *(["inside: published figures, for want of a second device"] * (link[1] is None)),
            ],
        },
    )


def _layer(request: Request, ranks: Sequence[Times]) -> tuple[MeasuredLayer, dict[str, float]]:
    """A tensor-parallel group is as slow as its slowest rank."""

    def slowest(name: str) -> Any:
        values = [getattr(times, name) for times in ranks]
        return [max(v) for v in zip(*values, strict=True)] if name in _LISTS else max(values)

    forward, forward_error = fit_layer(request.batches, slowest("forward_s"))
    backward, backward_error = fit_layer(request.batches, slowest("backward_s"))
    layer = MeasuredLayer(
        forward=forward,
        backward=backward,
        head_forward_s=slowest("head_forward_s"),
        head_backward_s=slowest("head_backward_s"),
        embedding_s=slowest("embedding_s"),
    )
    return layer, {"forward": forward_error, "backward": backward_error}


_LISTS = ("forward_s", "backward_s")


def table(found: Profile) -> list[str]:
    """What was found, for people."""
    lines = [
        f"{'TP':>2}  {'layer':8}  {'us/token':>9}  {'ns/l^2':>8}  {'MAPE %':>6}  head us/token"
    ]
    for tp, layer in sorted(found.layers.items()):
        for name, part, head_s in (
            ("forward", layer.forward, layer.head_forward_s),
            ("backward", layer.backward, layer.head_backward_s),
        ):
            error = found.notes["mape_percent"][str(tp)][name]
            lines.append(
                f"{tp:>2}  {name:8}  {part.alpha_s * 1e6:9.3f}  {part.beta_s * 1e9:8.4f}  "
                f"{error:6.2f}  {head_s * 1e6:13.3f}"
            )
    error = found.notes["link_mape_percent"]
    how = "published figures" if error is None else f"MAPE {error:.1f} %"
    lines.append(
        f"link: {found.inside.latency_s * 1e6:.1f} us, "
        f"{found.inside.bytes_per_s / 1e9:.3f} GB/s ({how}); "
        f"optimizer: {found.step_parameter_s * 1e9:.3f} ns/parameter"
    )
    return lines
