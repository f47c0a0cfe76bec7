"""Presets stand for ordinary flags, and whatever the user typed wins over them."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import pytest

from megatron.resilience.preset import (
    FOLDER,
    preset_names,
    read_preset,
    split_presets,
    with_defaults,
)
from megatron.resilience.settings import add_our_flags
from megatron.resilience.start import command_line
from resihp_ext.errors import UserError

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """``command_line`` prepares the environment: restored afterwards."""
    for name in ("CUDA_VISIBLE_DEVICES", "TORCHDYNAMO_DISABLE", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.setenv(name, "1")


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    path = tmp_path / "mine.args"
    path.write_text(
        "--lr 1e-3 # a comment\n--swiglu\n\n# more\n--no-rope-fusion\n--names a 'b c'\n"
    )
    return path


@pytest.fixture(scope="module")
def megatron_parser() -> argparse.ArgumentParser:
    """Megatron's real parser with our flags."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return add_our_flags(parser)


def refusal(argv: list[str]) -> str:
    with pytest.raises(UserError) as raised:
        command_line(argv)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("name", preset_names())
def test_shipped_presets_hold_flags_that_megatron_knows(
    name: str, megatron_parser: argparse.ArgumentParser
) -> None:
    words = read_preset(name)
    _, unknown = megatron_parser.parse_known_args(words)
    assert not unknown
    flags = [word for word in words if word.startswith("--")]
    assert len(flags) == len(set(flags)), "no flag twice"
    assert words[0].startswith("--")


def test_shipped_presets_are_the_files_of_the_folder() -> None:
    assert preset_names() == sorted(path.stem for path in FOLDER.iterdir())


def test_comments_quotes_and_empty_lines(preset: Path) -> None:
    expected = ["--lr", "1e-3", "--swiglu", "--no-rope-fusion", "--names", "a", "b c"]
    assert read_preset(str(preset)) == expected


def test_a_file_is_named_by_its_path_or_its_suffix(
    preset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(preset.parent)
    assert read_preset("mine.args") == read_preset("./mine.args") == read_preset(str(preset))
    bare = preset.with_suffix("")
    bare.write_text("--lr 2\n")
    assert read_preset(str(bare)) == ["--lr", "2"]


@pytest.mark.parametrize("spelled", ["--preset huge", "--preset=huge"])
def test_unknown_preset_is_one_line_that_lists_the_known(spelled: str) -> None:
    line = refusal(shlex.split(spelled))
    assert "--preset huge" in line
    for name in preset_names():
        assert name in line


@pytest.mark.parametrize("argv", [["--preset"], ["--preset", "--lr", "1"], ["--preset", "--"]])
def test_preset_without_a_name_is_one_line(argv: list[str]) -> None:
    assert "--preset needs a name: cpu, local, tiny" in refusal(argv)


def test_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    assert "No such file" in refusal(["--preset", str(tmp_path / "nothing.args")])
    assert "Is a directory" in refusal(["--preset", f"{tmp_path}/"])
    (tmp_path / "torn.args").write_text("--lr '1e-3\n")
    line = refusal(["--preset", str(tmp_path / "torn.args")])
    assert "check the quotes" in line
    assert str(tmp_path / "torn.args") in line


def test_presets_are_taken_out_of_the_command_line() -> None:
    argv = ["--lr", "1", "--preset", "a", "--swiglu", "--preset=b", "x", "--preset", "c"]
    assert split_presets(argv) == (["a", "b", "c"], ["--lr", "1", "--swiglu", "x"])
    assert split_presets([]) == ([], [])


@pytest.mark.parametrize(
    ("explicit", "kept"),
    [
        ("", "--lr 1 --swiglu --no-fusion --bare=2"),
        ("--lr 5", "--swiglu --no-fusion --bare=2"),
        ("--lr=5", "--swiglu --no-fusion --bare=2"),
        ("--bare 5", "--lr 1 --swiglu --no-fusion"),
        ("--bare=5", "--lr 1 --swiglu --no-fusion"),
        ("--swiglu", "--lr 1 --no-fusion --bare=2"),
        ("--no-swiglu", "--lr 1 --no-fusion --bare=2"),
        ("--no-fusion", "--lr 1 --swiglu --bare=2"),
        ("--fusion", "--lr 1 --swiglu --bare=2"),
        ("--lr-decay 5", "--lr 1 --swiglu --no-fusion --bare=2"),
        ("lr -lr swiglu", "--lr 1 --swiglu --no-fusion --bare=2"),
    ],
)
def test_what_the_user_gave_or_negated_is_dropped_from_the_preset(explicit: str, kept: str) -> None:
    words = with_defaults(["--lr", "1", "--swiglu", "--no-fusion", "--bare=2"], explicit.split())
    assert words == [*kept.split(), *explicit.split()]


def test_a_flag_leaves_with_all_its_values() -> None:
    defaults = ["--names", "a", "b", "-1", "--lr", "1"]
    assert with_defaults(defaults, ["--names", "z"]) == ["--lr", "1", "--names", "z"]
    assert with_defaults(defaults, ["--lr=2"]) == ["--names", "a", "b", "-1", "--lr=2"]


@pytest.mark.parametrize(
    ("explicit", "attribute", "value"),
    [
        ("--lr 5e-3", "lr", 5e-3),
        ("--lr=5e-3", "lr", 5e-3),
        ("--no-swiglu-is-not-a-flag", "swiglu", True),
        ("--no-swiglu", "swiglu", False),
        ("--num-layers=9", "num_layers", 9),
        ("--tokenizer-type=HuggingFaceTokenizer", "tokenizer_type", "HuggingFaceTokenizer"),
    ],
)
@pytest.mark.parametrize("preset_first", [True, False])
def test_the_user_wins_in_megatrons_own_parser(
    explicit: str,
    attribute: str,
    value: object,
    preset_first: bool,
    megatron_parser: argparse.ArgumentParser,
) -> None:
    argv = ["--preset", "tiny", *explicit.split()]
    words = command_line(argv if preset_first else [*argv[2:], *argv[:2]])
    args, _ = megatron_parser.parse_known_args(words)
    assert getattr(args, attribute) == value
    assert args.hidden_size == 128, "and the rest of the preset stays"


def test_of_several_presets_the_later_wins(preset: Path, tmp_path: Path) -> None:
    later = tmp_path / "later.args"
    later.write_text("--lr 2e-3 --no-swiglu --rope-fusion")
    both = ["--preset", str(preset), "--preset", str(later)]
    assert command_line([*both, "--lr=3"]) == shlex.split(
        "--names a 'b c' --no-swiglu --rope-fusion --lr=3"
    )
    reverse = [*both[2:], *both[:2]]
    assert command_line(reverse) == read_preset(str(preset))


def test_the_order_of_the_users_words_is_kept() -> None:
    explicit = ["--b", "1", "pos", "--a=2", "--b", "3"]
    assert with_defaults(["--z"], explicit) == ["--z", *explicit]
