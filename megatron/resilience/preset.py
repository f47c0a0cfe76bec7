"""Presets: files of ordinary Megatron flags, so that nobody types fifteen ``--no-*-fusion``.

``--preset NAME`` stands for the flags of ``presets/NAME.args`` (or of any file, by path). They come
before the user's flags on the command line, and a switch whose opposite the user gave is dropped:
explicit flags win.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from resihp_ext.errors import UserError

FOLDER = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """Names of the presets that ship with the project."""
    return sorted(path.stem for path in FOLDER.glob("*.args"))


def read_preset(name: str) -> list[str]:
    """Flags of a preset, ``#`` starting a comment.

    Raises:
        UserError: neither a shipped preset nor a readable file, unbalanced quotes, or a preset
            within a preset.
    """
    path = Path(name) if "/" in name or name.endswith(".args") else FOLDER / f"{name}.args"
    try:
        words = shlex.split(path.read_text("utf-8"), comments=True)
    except OSError as error:
        raise UserError(
            f"--preset {name}: {error.strerror}: {path}; shipped presets are "
            f"{', '.join(preset_names())}, anything else is the path of a file of flags"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"--preset {name}: {path} is not a text file in UTF-8") from error
    except ValueError as error:
        raise UserError(f"--preset {name}: {path}: {error}; check the quotes") from error
    if any(word.split("=")[0] == "--preset" for word in words):
        raise UserError(
            f"--preset {name}: {path} names another preset; name both on the command line"
        )
    return words


def split_presets(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Takes ``--preset`` out of a command line; returns preset names and the other words.

    Raises:
        UserError: ``--preset`` without a name.
    """
    names: list[str] = []
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--preset":
            name = next(words, "--")
            if name.startswith("--"):
                raise UserError(f"--preset needs a name: {', '.join(preset_names())} or a file")
            names.append(name)
        elif word.startswith("--preset="):
            names.append(word.removeprefix("--preset="))
        else:
            rest.append(word)
    return names, rest


def with_defaults(defaults: Sequence[str], explicit: Sequence[str]) -> list[str]:
    """Puts ``defaults`` before ``explicit``, less every flag that the user gave or negated."""
    given = {word.split("=")[0] for word in explicit if word.startswith("--")}
    kept: list[str] = []
    for flag in _flags(defaults):
        name = flag[0].split("=")[0]
        if name not in given and _opposite(name) not in given:
            kept += flag
    return [*kept, *explicit]


def _flags(words: Sequence[str]) -> list[list[str]]:
    """Groups words into flags with their values."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups


def _opposite(name: str) -> str:
    return f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else f"--no-{name[2:]}"
