"""Times and counts of the control plane that an operator may set: ``--control-conf KEY=VALUE,...``.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from resihp_ext.control.hang import HangRules
from resihp_ext.control.job_state import Rules
from resihp_ext.control.node import NodeLimits
from resihp_ext.control.server import ServerLimits
from resihp_ext.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """All limits of the control plane; no two of them share a name."""

    hang: HangRules = field(default_factory=HangRules)
    node: NodeLimits = field(default_factory=NodeLimits)
    server: ServerLimits = field(default_factory=ServerLimits)
    rules: Rules = field(default_factory=Rules)

    @classmethod
    def read(cls, text: str | None, *, restarts: int) -> Self:
        """Defaults, but for what a text like ``silence_s=3,deaths=5`` says.

        Args:
            restarts: From a flag of its own.

        Raises:
            UserError: names the key.
        """
        parts: dict[str, Any] = {
            "hang": HangRules(),
            "node": NodeLimits(),
            "server": ServerLimits(),
            "rules": Rules(restarts=restarts),
        }
        keys = {
            each.name: part
            for part, limits in parts.items()
            for each in fields(limits)
            if isinstance(getattr(limits, each.name), int | float) and each.name != "restarts"
        }
        for entry in filter(None, (text or "").split(",")):
            key, _, value = (word.strip() for word in entry.partition("="))
            if key not in keys:
                raise _refusal(f"unknown key {key!r}; known are {', '.join(sorted(keys))}")
            part = keys[key]
            kind = type(getattr(parts[part], key))
            parts[part] = replace(parts[part], **{key: _number(key, value, kind)})
        parts["node"] = replace(parts["node"], hang=parts["hang"])
        if parts["server"].node_silence_s <= parts["node"].lease_s:
            raise _refusal("node_silence_s must be longer than lease_s: else two parties train")
        return cls(**parts)


def _number(key: str, value: str, kind: type[int] | type[float]) -> int | float:
    try:
        number = kind(value)
    except ValueError:
        number = 0
    if not 0 < number < 1e9:
        what = "a whole number above 0" if kind is int else "a number above 0"
        raise _refusal(f"{key}: expected {what}, got {value!r}")
    return number


def _refusal(text: str) -> UserError:
    return UserError(f"resihp-run: --control-conf: {text}")
