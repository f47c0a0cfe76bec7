"""Reads settings from flags and from a file; a flag wins. Every wrong value is one line.

Values of a file are taken as text and read like flags: YAML by itself would take ``7:0.5`` for a
number to the base of sixty.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resihp_ext.errors import UserError

LARGEST = 10**9
"""Of whole numbers that have no limit of their own."""
_WHOLE = re.compile(r"\d{1,18}", re.ASCII)
SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The words of one setting and where they stand."""

    texts: tuple[str, ...]
    where: str
    folder: Path
    """What a path in it is relative to."""


class Settings:
    """What was given; asks for a type give it checked, or a line that says what is wrong."""

    def __init__(self, given: Mapping[str, Setting]) -> None:
        self._given = given

    @classmethod
    def of(cls, flags: Mapping[str, Sequence[str]], file: Mapping[str, Setting]) -> Settings:
        """Joins both; ``flags`` holds only those that were typed."""
        typed = {
            name: Setting(texts=tuple(texts), where=f"--{name}", folder=Path())
            for name, texts in flags.items()
        }
        return cls({**file, **typed})

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def error(self, name: str, reason: str) -> UserError:
        """What to raise about a setting; for a missing one, too."""
        one = self._given.get(name)
        return UserError(f"{one.where if one else f'--{name}'}: {reason}")

    def texts(self, name: str) -> tuple[str, ...]:
        """All values of a setting that may have several."""
        return self._given[name].texts if name in self._given else ()

    def text(self, name: str) -> str | None:
        """The one value."""
        texts = self.texts(name)
        if name in self._given and (len(texts) != 1 or not texts[0]):
            raise self.error(name, f"expected one value, got {list(texts)}")
        return texts[0] if texts else None

    def folder(self, name: str) -> Path:
        """What a path in a given setting is relative to."""
        return self._given[name].folder

    def whole(self, name: str, *, most: int | None = None) -> int | None:
        """A whole number from 1."""
        text, most = self.text(name), most or LARGEST
        if text is None:
            return None
        if not (_WHOLE.fullmatch(text) and 1 <= int(text) <= most):
            raise self.error(name, f"expected a whole number from 1 to {most}, got {text!r}")
        return int(text)

    def number(self, name: str, default: float) -> float:
        """A number above 0."""
        text = self.text(name)
        if text is None:
            return default
        value = as_number(text)
        if value is None or value <= 0:
            raise self.error(name, f"expected a number above 0, got {text!r}")
        return value

    def switch(self, name: str, default: bool = False) -> bool:
        """On or off."""
        text = self.text(name)
        if text is None:
            return default
        if text.lower() not in SWITCHES:
            raise self.error(name, f"expected true or false, got {text!r}")
        return SWITCHES[text.lower()]

    def choice(self, name: str, choices: Collection[str], default: str) -> str:
        """One of a few words."""
        text = self.text(name) or default
        if text not in choices:
            raise self.error(name, f"{text!r} is unknown; choose one of {', '.join(choices)}")
        return text


def as_number(text: str) -> float | None:
    """A finite number; None if it is not one."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None


def read_file(path: Path, names: Collection[str]) -> dict[str, Setting]:
    """Settings of a YAML file; ``_`` and ``-`` in keys are the same.

    Raises:
        UserError: the file cannot be read, or says something unknown.
    """
    import yaml  # only who has a file waits for it

    try:
        rows = yaml.load(path.read_text("utf-8"), Loader=yaml.BaseLoader)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(rows, dict):
        raise UserError(f"{path}: expected names with values, such as `tp: 4`")
    found = {}
    for key, value in rows.items():
        name = str(key).replace("_", "-")
        if name not in names:
            raise UserError(f"{path}: {key}: unknown; choose from {', '.join(names)}")
        where = f"{path}: {name}"
        found[name] = Setting(texts=_texts(where, value), where=where, folder=path.parent)
    return found


def _texts(where: str, value: object) -> tuple[str, ...]:
    """A value, a list of values, or names with values (``{7: 0.5}`` is ``7:0.5``)."""
    if isinstance(value, dict) and all(isinstance(one, str) for one in value.values()):
        value = [f"{key}:{one}" for key, one in value.items()]
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where}: expected a value or a list of values, got {value!r}")
    return tuple(texts)
