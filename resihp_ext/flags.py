"""Command-line flags generated from frozen dataclasses, so that a setting is written down once.

A field becomes a flag, its annotation the type, the string literal below it the help text. The
dataclass validates itself in ``__post_init__``.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from typing import Any


def field_docs(cls: type) -> dict[str, str]:
    """Reads the string literal that follows each annotated field in the source of ``cls``."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, literal in zip(body.body, body.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(literal, ast.Expr) and isinstance(literal.value, ast.Constant):
            docs[field.target.id] = " ".join(str(literal.value.value).split())
    return docs


def flag_name(field: str, prefix: str = "") -> str:
    """``("verify_checkpoint", "resilience-")`` gives ``--resilience-verify-checkpoint``."""
    return f"--{prefix}{field.replace('_', '-')}"


def add_flags(parser: argparse.ArgumentParser, cls: type, *, prefix: str = "") -> None:
    """Adds one flag per field of the dataclass ``cls`` in a group titled after the class.

    Booleans (default False) become switches; ``Literal`` becomes a choice; ``X | None`` parses X.

    Raises:
        TypeError: a field type that has no spelling as a flag, a boolean that defaults to True, or
            a field without a docstring: mistakes in the dataclass, found by the first test.
    """
    docs = field_docs(cls)
    title = (inspect.getdoc(cls) or cls.__name__).splitlines()[0].rstrip(".")
    group = parser.add_argument_group(title=title)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name not in docs:
            raise TypeError(f"{cls.__name__}.{field.name} has no docstring, so its flag no help")
        default = field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        options = _options(f"{cls.__name__}.{field.name}", hints[field.name], default)
        text = docs[field.name].replace("%", "%%")
        group.add_argument(
            flag_name(field.name, prefix), dest=_dest(field.name, prefix), help=text, **options
        )


def from_namespace[Config](
    namespace: argparse.Namespace, cls: type[Config], *, prefix: str = ""
) -> Config:
    """Builds ``cls`` from parsed flags.

    Raises:
        UserError: whatever the dataclass finds wrong with the values.
    """
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    return cls(**{name: getattr(namespace, _dest(name, prefix)) for name in names})


def _dest(field: str, prefix: str) -> str:
    return prefix.replace("-", "_") + field


def _options(where: str, annotation: Any, default: Any) -> dict[str, Any]:
    kinds = [annotation]
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    (kind,) = kinds if len(kinds) == 1 else (None,)
    if kind is bool and default is False:
        return {"action": "store_true"}
    if typing.get_origin(kind) is typing.Literal:
        return {"choices": list(typing.get_args(kind)), "default": default}
    if kind in (str, int, float):
        return {"type": kind, "default": default}
    raise TypeError(f"{where}: {annotation} with default {default!r} cannot become a flag")
