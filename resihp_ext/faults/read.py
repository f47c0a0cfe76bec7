"""Faults as a YAML list, in and out.

    - {at_step: 7, phase: backward, rank: 3, kind: kill}
    - {at_step: 9, node: n1, kind: node}
    - {at_step: 12, rank: 5, kind: slow, factor: 0.5, until_step: 20}

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from resihp_ext.errors import UserError
from resihp_ext.faults.fault import By, Fault, Kind, Phase

_KEYS = ("at_step", "phase", "micro_batch", "rank", "node", "link", "kind")
KEYS = (*_KEYS, *(each.name for each in fields(Fault) if each.name not in _KEYS))
"""Keys of an entry, in the order in which they are written."""

_DEFAULTS = {each.name: each.default for each in fields(Fault) if each.default is not MISSING}


def read_faults(path: str | Path) -> tuple[Fault, ...]:
    """Reads and checks a file of faults.

    Raises:
        UserError: names the file, the entry, and what is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error
    return faults_from_yaml(text, path)


def faults_from_yaml(text: str, path: str | Path) -> tuple[Fault, ...]:
    """Reads and checks faults.

    Args:
        path: Where the text comes from, for messages.

    Raises:
        UserError: names the file, the entry (from 0), and what is wrong.
    """
    try:
        rows = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(rows, list):
        raise UserError(f"{path}: expected a list of faults, got {_short(rows)}")
    found = []
    for number, row in enumerate(rows):
        try:
            found.append(_fault(row))
        except UserError as error:
            raise UserError(f"{path}: entry {number}: {error}") from None
    return tuple(found)


def faults_to_yaml(faults: Iterable[Fault]) -> str:
    """Inverse of :func:`faults_from_yaml`: one line a fault, defaults left out."""
    lines = [
        yaml.safe_dump(_row(one), default_flow_style=True, sort_keys=False, width=10_000)
        for one in faults
    ]
    return "".join(f"- {line}" for line in lines) or "[]\n"


def _row(fault: Fault) -> dict[str, Any]:
    plain = {}
    for key in KEYS:
        value = getattr(fault, key)
        if key not in _DEFAULTS or value != _DEFAULTS[key]:
            value = list(value) if isinstance(value, tuple) else value
            plain[key] = value.value if isinstance(value, StrEnum) else value
    return plain


def _fault(row: Any) -> Fault:
    if not isinstance(row, dict):
        raise UserError(f"expected names with values, such as kind: kill, got {_short(row)}")
    unknown = [key for key in row if key not in KEYS]
    if unknown:
        raise UserError(f"unknown key {_short(unknown[0])}; known are {', '.join(KEYS)}")
    missing = [key for key in ("at_step", "kind") if row.get(key) is None]
    if missing:
        raise UserError(f"needs {' and '.join(missing)}")
    told = {key: value for key, value in row.items() if value is not None}
    told["kind"] = _member("kind", Kind, told["kind"])
    if "phase" in told:
        told["phase"] = _member("phase", Phase, told["phase"])
    if "by" in told:
        told["by"] = _member("by", By, told["by"])
    if "node" in told:
        told["node"] = _name(told["node"])
    if "link" in told:
        told["link"] = _link(told["link"])
    return Fault(**told)


def _member[Words: StrEnum](key: str, words: type[Words], value: Any) -> Words:
    if value not in list(words):
        raise UserError(f"{key}: expected one of {', '.join(words)}, got {_short(value)}")
    return words(value)


def _link(value: Any) -> tuple[str, str]:
    if not isinstance(value, list) or len(value) != 2:
        raise UserError(f"link: expected two nodes, such as [n0, n1], got {_short(value)}")
    return _name(value[0]), _name(value[1])


def _name(value: Any) -> Any:
    """A node whose name is a number need not be quoted."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
