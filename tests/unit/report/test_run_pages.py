"""The page of a run, from the files that a job keeps."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from megatron.resilience.cli.main import main, resihp
from resihp_ext.plan.plan import Plan, Replica, uniform_plan
from resihp_ext.report.run import read_run
from resihp_ext.report.write import as_page

pytestmark = pytest.mark.unit

PLAN = uniform_plan(num_layers=8, tp=2, pp=2, dp=2, micro_batches=8)


def after(plan: Plan) -> Plan:
    """Rank 3 is dead, and its partner on standby."""
    devices = tuple(replace(d, p=0.0 if d.rank == 3 else 1.0) for d in plan.devices)
    replicas = tuple(
        Replica(
            stages=tuple(
                replace(one, ranks=tuple(r for r in one.ranks if r != 3)) for one in each.stages
            )
        )
        for each in plan.replicas
    )
    return plan.next_version(devices=devices, replicas=replicas).validated()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six steps, of which the fourth was done twice; the steps take a second, later two."""
    lines: list[Mapping[str, Any]] = [event(0.0, 0, "job_start", device={}, emulated=False)]
    now = 0.0
    for step, seconds in ((1, 1), (2, 1), (3, 1), (4, 1), (4, 1), (5, 2), (6, 2)):
        now += seconds
        for replica in (0, 1):
            batch = [{"tokens": 512, "segments": [512]}]
            lines.append(
                event(now, step, "micro_batches", plan=0, replica=replica, micro_batches=batch)
            )
        lines.append(event(now, step, "iteration", losses={"lm loss": 5 - 0.1 * step}))
    lines.append(event(4.5, 4, "transition", to_version=1, from_version=0))
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (tmp_path / "plans").mkdir()
    (tmp_path / "receipts").mkdir()
    for plan in (PLAN, after(PLAN)):
        (tmp_path / "plans" / f"{plan.version:03d}.json").write_text(plan.to_json())
    receipt = {
        "reason": "rank 3 was <killed> by signal 9",
        "step": 4,
        "from_version": 0,
        "to_version": 1,
        "phases_s": {"detect": 0.1, "move": 0.4, "tiny": 0.001},
        "total_s": 0.5,
        "moved_bytes": 4096,
        "redone_steps": 1,
        "losses": [{"rank": 3, "cause": "was killed"}],
        "resumed_s": 1004.5,
        "source": "owners",
        "rewound_to_step": None,
    }
    (tmp_path / "receipts" / "000.json").write_text(json.dumps(receipt))
    return tmp_path


def event(at_s: float, step: int, name: str, **fields: Any) -> Mapping[str, Any]:
    return {"time_s": 1000.0 + at_s, "rank": 0, "step": step, "event": name, **fields}


def test_steps_that_were_done_again_count_once(folder: Path) -> None:
    run = read_run(folder)
    assert [one.step for one in run.iterations] == [1, 2, 3, 4, 5, 6]
    assert [one.tokens for one in run.iterations] == [1024] * 6
    assert [one.seconds for one in run.iterations[1:]] == [1, 1, 2, 2, 2]
    assert run.iterations[-1].end_s == 9
    assert run.badges == []


def test_the_page_tells_the_story(folder: Path) -> None:
    html = as_page(read_run(folder))
    assert (
        "6 steps in 9.0 s, up to step 6. Once ranks were lost (3) and the others went on." in html
    )
    assert "rank 3 was &lt;killed&gt; by signal 9" in html
    assert '<td>steps done again</td><td class="n">1</td>' in html
    assert "dead: 3" in html
    assert "all others" in html
    assert "Throughput" in html
    assert "One step of the last plan as its program says" in html


def test_the_same_folder_gives_the_same_bytes(folder: Path) -> None:
    assert as_page(read_run(folder)) == as_page(read_run(folder))


def test_what_is_broken_is_told_and_the_rest_is_shown(folder: Path) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"time_s": 1010.0, "ev')
    (folder / "plans" / "001.json").write_text("{")
    (folder / "receipts" / "001.json").write_text("[]")
    html = as_page(read_run(folder))
    assert "1 of 24 lines of events.jsonl could not be read." in html
    assert "plans/001.json could not be read." in html
    assert "receipts/001.json could not be read." in html
    assert "This plan was not kept." in html
    assert "6 steps in" in html


def test_a_run_says_when_it_was_not_real(folder: Path) -> None:
    path = folder / "events.jsonl"
    path.write_text(path.read_text().replace('"emulated": false', '"source": "simulated"'))
    assert read_run(folder).badges == ["simulated"]


def test_a_job_that_has_only_begun_has_a_page(folder: Path) -> None:
    path = folder / "events.jsonl"
    path.write_text(path.read_text().splitlines()[0] + "\n")
    shutil.rmtree(folder / "receipts")
    shutil.rmtree(folder / "plans")
    assert "No step has ended in 0.0 s. The layout never changed." in as_page(read_run(folder))


def test_the_verb_writes_whole_files(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "pages" / "run.html"
    found = CliRunner().invoke(resihp, ["report", str(folder), "--out", str(out)])
    assert found.exit_code == 0, found.output
    assert found.output.strip() == str(out)
    assert out.read_text().startswith("<!doctype html>")
    assert [one.name for one in out.parent.iterdir()] == ["run.html"]


@pytest.mark.parametrize("content", [None, "", "nonsense\n"])
def test_where_there_is_no_run_one_line_says_so(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "events.jsonl").write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path}/events.jsonl: no ")
    assert said.count("\n") == 1


CHROMIUM = shutil.which("chromium")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_real_browser_shows_every_chart(folder: Path) -> None:
    page = folder / "report.html"
    script = (
        "<script>document.title=[...document.querySelectorAll('svg')].map(s=>"
        "Math.round(s.getBoundingClientRect().width)>300&&s.getBoundingClientRect().height>40)"
        ".join()</script></body>"
    )
    page.write_text(as_page(read_run(folder)).replace("</body>", script))
    assert CHROMIUM is not None
    words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()]
    found = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert "<title>true,true,true,true</title>" in found.stdout
    assert "Uncaught" not in found.stderr
