"""How Megatron's refusals become one line, and which starts are refused at all."""

import argparse
import sys
from pathlib import Path

import pytest
from torch import distributed

from megatron.resilience.checkpoint.config import CheckpointSafetyConfig
from megatron.resilience.model.config import InitialWeightsConfig
from megatron.resilience.settings import Settings, add_our_flags
from megatron.resilience.upstream import origin
from megatron.resilience.upstream.arguments import (
    _command_line,
    _gave,
    _negates_switch,
    _repair_help,
    reason_of,
    refuse,
    user_errors,
)
from megatron.resilience.upstream.resume import job_store, resolve_load
from resihp_ext.environment import RankEnvironment
from resihp_ext.errors import UserError

pytestmark = pytest.mark.unit


def our_settings(*words: str) -> Settings:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.error = refuse
    return Settings.from_namespace(add_our_flags(parser).parse_args(list(words)))


def test_initial_weights_are_those_of_every_layout_unless_asked_otherwise():
    assert our_settings().initial_weights == InitialWeightsConfig(initial_weights="logical")
    assert our_settings("--initial-weights", "upstream").initial_weights.initial_weights == (
        "upstream"
    )


@pytest.mark.parametrize(
    "words",
    [["--initial-weights", "random"], ["--no-such-flag"], ["--device", "tpu"]],
    ids=lambda words: words[0],
)
def test_a_wrong_flag_of_ours_is_one_line_that_names_it(words):
    with pytest.raises(UserError) as caught:
        our_settings(*words)
    line = str(caught.value)
    assert words[0] in line
    assert "\n" not in line
    assert line.endswith("see --help")


@pytest.mark.parametrize("kind", [AssertionError, ValueError, RuntimeError, TypeError])
def test_refusals_of_megatron_become_one_line(kind):
    with pytest.raises(UserError) as caught, user_errors("model"):
        raise kind("heads (3)\n   do not divide by\ttwo")
    line = str(caught.value)
    assert line.startswith("model: heads (3) do not divide by two (test_config_guard.py:")
    assert isinstance(caught.value.__cause__, kind)


def test_a_bare_assertion_is_quoted():
    degree = 3
    with pytest.raises(AssertionError) as caught:
        assert degree % 2 == 0
    caught.value.args = ()  # pytest writes a text into every assertion of a test
    assert reason_of(caught.value).startswith("it demands: assert degree % 2 == 0 (")


def test_errors_of_ours_and_of_others_pass_through():
    ours = UserError("said already")
    with pytest.raises(UserError) as caught, user_errors("model"):
        raise ours
    assert caught.value is ours
    with pytest.raises(KeyError), user_errors("model"):
        raise KeyError("a defect, to be seen with its traceback")


def upstream_like() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--no-bias", action="store_false", dest="bias")
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--seed", type=int, help="50% of the luck")
    parser.add_argument("--lr", help="as %(prog)s says: 10%%")
    return parser


@pytest.mark.parametrize(
    ("word", "negates"),
    [
        ("--no-sequence-parallel", True),
        ("--no-bias", False),  # a flag of its own
        ("--no-seed", False),  # takes a value: nothing to switch off
        ("--no-such", False),
        ("--sequence-parallel", False),
        ("no-sequence-parallel", False),
    ],
)
def test_which_words_only_take_a_switch_out_of_a_preset(word, negates):
    assert _negates_switch(upstream_like(), word) is negates


def test_help_that_argparse_cannot_format_is_escaped():
    parser = upstream_like()
    with pytest.raises((ValueError, TypeError)):
        parser.format_help()
    _repair_help(parser)
    text = parser.format_help()
    assert "50% of the luck" in text
    assert f"as {parser.prog} says: 10%" in text


def test_a_flag_counts_as_given_with_a_space_or_an_equals_sign():
    assert _gave(["--padded-vocab-size", "384"], "--padded-vocab-size")
    assert _gave(["--padded-vocab-size=384"], "--other", "--padded-vocab-size")
    assert not _gave(["--padded-vocab-size-x", "384"], "--padded-vocab-size")


def test_the_command_line_is_put_back_whatever_happens():
    before = list(sys.argv)
    seen: list[list[str]] = []

    def fail() -> None:
        with _command_line(["--seed", "1"]):
            seen.append(list(sys.argv))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == [[before[0], "--seed", "1"]]
    assert sys.argv == before


def rank(**variables: str) -> RankEnvironment:
    return RankEnvironment.from_environ(variables)


def test_several_ranks_without_a_meeting_place_are_refused():
    with pytest.raises(UserError, match=r"WORLD_SIZE=2 without MASTER_ADDR.*resihp-run"):
        job_store(rank(RANK="1", WORLD_SIZE="2"))


def test_one_process_needs_no_meeting_place():
    store = job_store(rank())
    store.set("key", "value")
    assert store.get("key") == b"value"


def load_arguments(load: Path | None, **changed: object) -> argparse.Namespace:
    given = {"load": load and str(load), "save": None, "ckpt_format": "torch_dist"}
    rest = {"ckpt_step": None, "exit_on_missing_checkpoint": False}
    return argparse.Namespace(**(given | rest | changed))


def resolve(args: argparse.Namespace) -> argparse.Namespace:
    resolve_load(args, CheckpointSafetyConfig(), distributed.HashStore(), rank())
    return args


def test_without_load_nothing_is_decided():
    assert resolve(load_arguments(None)) == load_arguments(None)


def test_load_of_nothing_never_starts_from_random_weights(tmp_path):
    with pytest.raises(UserError, match=str(tmp_path / "nothing")):
        resolve(load_arguments(tmp_path / "nothing"))


def test_foreign_formats_are_left_to_upstream_which_has_to_find_them(tmp_path):
    args = resolve(load_arguments(tmp_path / "nothing", ckpt_format="torch"))
    assert args.exit_on_missing_checkpoint
    assert args.load == str(tmp_path / "nothing")


def test_megatron_comes_from_its_wheel():
    origin.require_wheel()
    assert (origin.wheel_folder() / "megatron" / "core" / "__init__.py").is_file()


def test_a_checkout_that_shadows_the_wheel_is_named(tmp_path, monkeypatch):
    """``find_spec`` reports the module that is loaded; a checkout loads itself under the name."""
    import megatron.core

    checkout = tmp_path / "megatron" / "core" / "__init__.py"
    monkeypatch.setattr(megatron.core.__spec__, "origin", str(checkout))
    with pytest.raises(UserError) as caught:
        origin.require_wheel()
    assert str(checkout) in str(caught.value)
    assert str(origin.wheel_folder()) in str(caught.value)
