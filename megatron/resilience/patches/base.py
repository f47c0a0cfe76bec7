"""What every patch of an upstream symbol has in common.

A patch names its symbol, the reason, and when it can be deleted; it refuses an upstream that does
not look as it assumes; ``apply`` is idempotent and ``undo`` restores the very object that was
there.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from resihp_ext.errors import UpstreamDriftError

KNOWN_MEGATRON = "0.19."
_INHERITED = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchStatus:
    """One line of ``resihp doctor``: whether a patch would apply to what is installed."""

    symbol: str
    status: str
    """``applies``, ``drifted`` or ``not needed``."""
    detail: str


class Patch(ABC):
    """One upstream symbol, replaced while applied."""

    symbol: ClassVar[str]
    """Dotted name of what is replaced, for messages."""
    reason: ClassVar[str]
    delete_when: ClassVar[str]
    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})
    """Devices on which the patch is needed."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    @property
    def applied(self) -> bool:
        return bool(self._originals)

    @abstractmethod
    def drift(self) -> str | None:
        """Says how upstream differs from what the patch assumes; None when it does not."""

    def problem(self) -> str | None:
        """Says why the patch does not fit what is installed; None when it does."""
        try:
            return version_drift() or self.drift()
        except (AttributeError, UpstreamDriftError) as error:
            return str(error)

    @abstractmethod
    def install(self) -> None:
        """Replaces the symbol, through :meth:`replace` only."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Sets ``owner.name``, remembering what was there for :meth:`undo`."""
        getattr(owner, name)  # what upstream does not have cannot be replaced
        self._originals.append((owner, name, vars(owner).get(name, _INHERITED)))
        setattr(owner, name, value)

    def apply(self) -> None:
        """Applies the patch once.

        Raises:
            UpstreamDriftError: the installed upstream is not the one this patch was written for.
        """
        if self.applied:
            return
        problem = self.problem()
        if problem:
            raise UpstreamDriftError(
                f"patch of {self.symbol} does not fit the installed Megatron: {problem}; "
                f"install megatron-core {KNOWN_MEGATRON}x or update the patch"
            )
        self.install()

    def undo(self) -> None:
        """Puts every replaced object back, in reverse order."""
        while self._originals:
            owner, name, value = self._originals.pop()
            if value is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def version_drift() -> str | None:
    """Says which megatron-core is installed when it is not one the patches know."""
    version = importlib.metadata.version("megatron-core")
    return None if version.startswith(KNOWN_MEGATRON) else f"megatron-core {version} is not known"


def signature_drift(function: Callable[..., Any], expected: str) -> str | None:
    """Compares the parameter names of ``function`` with ``expected`` ("a, b, c")."""
    found = ", ".join(inspect.signature(function).parameters)
    if found == expected:
        return None
    return f"{function.__module__}.{function.__qualname__}({found}), expected ({expected})"


def upstream_module(name: str) -> Any:
    """Imports ``name``; a module that upstream removed is drift, not a crash.

    Raises:
        UpstreamDriftError: no such module.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UpstreamDriftError(f"upstream module {name} is gone: {error}") from error
