"""The command by which another node joins: what of the first node's command is in it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from resihp_ext.control.ask import Invitation
from resihp_ext.launcher import run
from resihp_ext.launcher.invitation import invitation, program_words

pytestmark = pytest.mark.unit

C10D = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "n0:29400")


def invited(*argv: str, environ: Mapping[str, str] | None = None) -> Invitation:
    from torch.distributed import run as torchrun

    parser = run._parser(torchrun)
    args = run._parse(parser, argv)
    run._choose_rendezvous(torchrun, args)
    return invitation(parser, args, environ or {}, ["resihp-run"])


def parsed_again(words: tuple[str, ...]) -> dict[str, object]:
    from torch.distributed import run as torchrun

    return vars(run._parse(run._parser(torchrun), words[1:]))


def test_what_is_one_nodes_own_is_left_out() -> None:
    own = ("--local-addr", "10.0.0.1", "--node-rank=0", "--max-restarts", "7")
    conf = ("--rdzv-conf", "is_host=1,timeout=9")
    flags = ("--nnodes=2:4", "--nproc_per_node", "8", "-t", "3", "--control-conf", "deaths=5")
    found = invited(*own, *C10D, *conf, *flags, "train.py", "--lr", "1", "--nnodes", "x")
    assert found.words == (
        *("resihp-run", "--nnodes", "2:4", "--nproc-per-node", "8", *C10D),
        *("--rdzv-id", "none", "--rdzv-conf", "timeout=9", "--tee", "3"),
        *("--control-conf", "deaths=5", "train.py", "--lr", "1", "--nnodes", "x"),
    )
    assert (found.folder, found.needs_token, found.obstacle) == (str(Path.cwd()), False, "")


def test_the_command_means_what_the_first_one_did() -> None:
    hard = ("--log-line-prefix-template=-${rank}", "--duplicate-stdout-filters", "a,,b,c", "-m")
    found = invited(*C10D, "--nnodes", "3", "--rdzv-id", "j", *hard, "package.module", "-x")
    again = parsed_again(found.words)
    assert again["log_line_prefix_template"] == "-${rank}"
    assert again["duplicate_stdout_filters"] == ["a,b", "c"]
    assert (again["module"], again["training_script"]) == (True, "package.module")
    assert again["training_script_args"] == ["-x"]


def test_flags_from_the_environment_are_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "5")
    monkeypatch.setenv("PET_ROLE", "worker")
    found = invited(*C10D, "a.py", environ={"PET_NNODES": "5", "PET_ROLE": "worker"})
    monkeypatch.undo()
    again = parsed_again(found.words)
    assert (again["nnodes"], again["role"]) == ("5", "worker")


def test_a_token_from_the_environment_is_needed_there_too() -> None:
    environ = {"RESIHP_TOKEN": "ab" * 32}
    found = invited(*C10D, "--nnodes", "2", "a.py", environ=environ)
    assert found.needs_token
    assert not any("ab" * 32 in word for word in found.words)
    file = ("--control-token-file", "t")
    assert not invited(*C10D, "--nnodes", "2", *file, "a.py", environ=environ).needs_token


@pytest.mark.parametrize(
    ("argv", "obstacle"),
    [
        (("a.py",), "it was started for one node"),
        (("--standalone", "a.py"), "it was started for one node"),
        ((*C10D, "--nnodes", "1", "a.py"), "it was started for one node"),
        (("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "h:0", "a.py"), "one node"),
        (("--nnodes", "2", "--master-addr", "h", "a.py"), "rendezvous (static) admits nobody"),
    ],
)
def test_some_jobs_take_no_other_node(argv: tuple[str, ...], obstacle: str) -> None:
    found = invited(*argv)
    assert obstacle in found.obstacle
    assert found.words == ()


@pytest.mark.parametrize(
    ("started", "words"),
    [
        (["/v/bin/python", "/v/bin/resihp-run"], ["/v/bin/resihp-run"]),
        (["python", "-m", "resihp_ext.launcher.run"], ["-m", "resihp_ext.launcher.run"]),
        (["python", "-u", "mine.py"], ["-u", "mine.py"]),
    ],
)
def test_how_the_launcher_was_started(started: list[str], words: list[str]) -> None:
    flags = ["--nnodes", "2", "a.py"]
    own = [started[-1], *flags]
    expected = words if words[0].startswith("/") else [sys.executable, *words]
    assert program_words(None, [*started, *flags], own) == expected
    # Called by another program: its own command line says nothing.
    module = [sys.executable, "-m", "resihp_ext.launcher.run"]
    assert program_words(["a.py"], [*started, *flags], own) == module
    assert program_words(None, [*started, "other"], own) == module
