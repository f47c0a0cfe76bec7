"""Flags made from dataclasses, and the whole list of ours, frozen in ``tests/golden/flags.txt``."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import pytest

from megatron.resilience import preset
from megatron.resilience.settings import GROUPS, Settings, add_our_flags
from resihp_ext.errors import UserError
from resihp_ext.flags import add_flags, field_docs, flag_name, from_namespace

pytestmark = pytest.mark.unit


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Title of the group.

    Not part of it.
    """

    switch: bool = False
    """Turns it on; costs 5 % of a step."""
    count_s: float = 1.5
    """Two lines
    of help."""
    number: int = 3
    """A whole number."""
    place: str | None = None
    """A directory."""
    limit: int | None = None
    """A number or nothing."""
    kind: Literal["a", "b"] = "a"
    """One of two."""
    made: int = field(default_factory=lambda: 7)
    """Made anew."""

    def __post_init__(self) -> None:
        if self.number < 0:
            raise UserError(f"--x-number is {self.number}; give 0 or more")


def parser_of(cls: type, prefix: str = "") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="test", allow_abbrev=False, exit_on_error=False)
    add_flags(parser, cls, prefix=prefix)
    return parser


def parsed(argv: list[str], prefix: str = "x-") -> Sample:
    return from_namespace(parser_of(Sample, prefix).parse_args(argv), Sample, prefix=prefix)


def test_without_flags_the_defaults_hold() -> None:
    assert parsed([]) == Sample()
    assert parsed([], prefix="") == Sample()


@pytest.mark.parametrize("join", [" ", "="], ids=["--x v", "--x=v"])
def test_every_kind_of_field_is_parsed(join: str) -> None:
    words = ["--x-count-s 2", "--x-number 4", "--x-place a", "--x-limit 5", "--x-kind b"]
    argv = " ".join(word.replace(" ", join) for word in [*words, "--x-made 1"]).split()
    found = parsed([*argv, "--x-switch"])
    expected = Sample(switch=True, count_s=2.0, number=4, place="a", limit=5, kind="b", made=1)
    assert found == expected
    assert [type(getattr(found, each.name)) for each in fields(Sample)] == [
        type(getattr(expected, each.name)) for each in fields(Sample)
    ]


@pytest.mark.parametrize(
    "argv",
    [
        ["--x-number", "1.5"],
        ["--x-count-s", "soon"],
        ["--x-kind", "c"],
        ["--x-limit", "None"],
        ["--x-switch=yes"],
        ["--x-number"],
    ],
    ids=" ".join,
)
def test_wrong_values_are_refused_by_name(argv: list[str]) -> None:
    with pytest.raises(argparse.ArgumentError) as refusal:
        parsed(argv)
    assert argv[0].partition("=")[0] in str(refusal.value)


def test_the_dataclass_judges_its_own_values() -> None:
    with pytest.raises(UserError, match="--x-number is -1; give 0 or more"):
        parsed(["--x-number", "-1"])


def test_help_comes_from_the_docstrings() -> None:
    text = " ".join(parser_of(Sample).format_help().split())
    assert "Title of the group:" in text
    assert "Not part of it" not in text
    for part in ("--switch Turns it on; costs 5 % of a step.", "Two lines of help.", "{a,b}"):
        assert part in text


def test_docstrings_of_fields() -> None:
    docs = field_docs(Sample)
    assert set(docs) == {each.name for each in fields(Sample)}
    assert docs["count_s"] == "Two lines of help."


def test_names_of_flags() -> None:
    assert flag_name("verify_checkpoint", "resilience-") == "--resilience-verify-checkpoint"
    assert flag_name("device") == "--device"


def test_mistakes_in_a_dataclass_are_found() -> None:
    @dataclass(frozen=True)
    class NoDocstring:
        """One."""

        a: int = 1

    @dataclass(frozen=True)
    class OnByDefault:
        """Two."""

        a: bool = True
        """Documented."""

    @dataclass(frozen=True)
    class NoSpelling:
        """Three."""

        a: tuple[int, ...] = ()
        """Documented."""

    for cls, complaint in (
        (NoDocstring, r"NoDocstring\.a has no docstring"),
        (OnByDefault, r"OnByDefault\.a: .*default True"),
        (NoSpelling, r"NoSpelling\.a: .*cannot become a flag"),
    ):
        with pytest.raises(TypeError, match=complaint):
            parser_of(cls)


# -- ours ----------------------------------------------------------------------


def our_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    return add_our_flags(parser)


def describe(action: argparse.Action) -> str:
    """One line: spelling, values, default, help."""
    values = "switch" if action.nargs == 0 else getattr(action.type, "__name__", "str")
    if action.choices:
        values = "|".join(map(str, action.choices))
    help_text = (action.help or "").replace("%%", "%")
    return f"{' '.join(action.option_strings)} <{values}> = {action.default}: {help_text}"


def test_our_flags_are_the_known_ones(golden: Callable[[str, str], None]) -> None:
    """A changed flag is a promise to users that is changed: deliberately, or not at all."""
    lines = ["--preset <name or file> = None: read before any parser, may be repeated"]
    for group in our_parser()._action_groups:
        if group._group_actions:
            lines += ["", f"# {group.title}", *map(describe, group._group_actions)]
    golden("flags.txt", "\n".join(lines) + "\n")


def test_entry_point_names_the_groups_as_help_does() -> None:
    text = (Path(__file__).parents[2] / "pretrain_gpt.py").read_text(encoding="utf-8")
    named = set(re.findall(r'"([^"]+)"', ast.get_docstring(ast.parse(text)) or ""))
    assert named == {each.title for each in our_parser()._action_groups if each._group_actions}


def test_preset_is_read_before_any_parser() -> None:
    """What the first line of the golden file says."""
    assert preset.split_presets(["--preset", "a", "--preset=b"]) == (["a", "b"], [])
    with pytest.raises(SystemExit):
        our_parser().parse_args(["--preset", "a"])


def test_defaults_of_our_flags_are_those_of_the_dataclasses() -> None:
    settings = Settings.from_namespace(our_parser().parse_args([]))
    for name, (config, _) in GROUPS.items():
        assert getattr(settings, name) == config()


def test_each_of_our_flags_reaches_its_setting() -> None:
    """Two of the same destination would overwrite each other silently."""
    samples = {bool: True, float: 2.5, int: 2}
    for name, (config, prefix) in GROUPS.items():
        for each in fields(config):
            flag = flag_name(each.name, prefix)
            (action,) = [a for a in our_parser()._actions if flag in a.option_strings]
            if action.nargs == 0:
                value, argv = True, [flag]
            elif action.choices:
                value = next(choice for choice in action.choices if choice != action.default)
                argv = [flag, str(value)]
            else:
                value = samples.get(action.type, "text")  # type: ignore[call-overload]
                argv = [flag, str(value)]
            settings = Settings.from_namespace(our_parser().parse_args(argv))
            changed = {
                (group, other.name)
                for group, (kind, _) in GROUPS.items()
                for other in fields(kind)
                if getattr(getattr(settings, group), other.name) != getattr(kind(), other.name)
            }
            assert changed == {(name, each.name)}
            assert getattr(getattr(settings, name), each.name) == value


def test_no_flag_or_destination_of_ours_is_megatrons() -> None:
    from megatron.training.arguments import add_megatron_arguments

    theirs = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_megatron_arguments(theirs)
    ours = our_parser()._actions
    for attribute in ("option_strings", "dest"):
        taken = {name for action in theirs._actions for name in words(getattr(action, attribute))}
        mine = {name for action in ours for name in words(getattr(action, attribute))}
        assert not taken & mine


def words(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def test_units_are_in_the_names() -> None:
    """Numbers of ours carry their unit."""
    for config, _ in GROUPS.values():
        for each in fields(config):
            if type(each.default) in (int, float):
                assert re.search(r"_(s|ms|bytes|ratio|steps|micro_batches)$", each.name), each.name


def test_help_texts_say_what_a_choice_means() -> None:
    for config, _ in GROUPS.values():
        docs = field_docs(config)
        for each in ast.walk(ast.parse(inspect.getsource(config))):
            if isinstance(each, ast.AnnAssign) and "Literal" in ast.unparse(each.annotation):
                name = ast.unparse(each.target)
                for choice in ast.walk(each.annotation):
                    if isinstance(choice, ast.Constant):
                        assert f"{choice.value}:" in docs[name], (name, choice.value)
