"""Patch: do not run ``make`` inside the installed package.

Symbol: ``megatron.core.datasets.utils.compile_helpers``.
Versions: megatron-core 0.19.x, on every device.
Reason: the wheel ships the compiled helper and no Makefile; upstream's call would end the job.
Delete when: upstream skips the call if the compiled helper can be imported.
"""

from __future__ import annotations

import importlib

from megatron.resilience.patches.base import Patch, signature_drift, upstream_module

_MODULE = "megatron.core.datasets.utils"


def _already_compiled() -> None:
    importlib.import_module("megatron.core.datasets.helpers_cpp")


class CompileHelpers(Patch):
    """Imports the compiled dataset helper instead of building it."""

    symbol = f"{_MODULE}.compile_helpers"
    reason = "the wheel ships the compiled helper and no Makefile"
    delete_when = "upstream skips the build when the helper is importable"
    devices = frozenset({"cpu", "cuda"})

    def drift(self) -> str | None:
        return signature_drift(upstream_module(_MODULE).compile_helpers, "")

    def install(self) -> None:
        self.replace(upstream_module(_MODULE), "compile_helpers", _already_compiled)
