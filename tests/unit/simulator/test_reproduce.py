"""``resihp reproduce``: settings, scenarios, bounds, claims, and the command from end to end."""

from __future__ import annotations

import csv
import time
from dataclasses import dataclass
from math import inf
from pathlib import Path

import pytest

from megatron.resilience.cli.main import main
from resihp_ext.errors import UserError
from resihp_ext.reproduce.ablated import ABLATED, STEPS, made
from resihp_ext.reproduce.case import Case
from resihp_ext.reproduce.figure import Bars, Claim, Lines, middle
from resihp_ext.reproduce.page import picture
from resihp_ext.reproduce.parts import PARTS, chosen
from resihp_ext.reproduce.pool import ReproduceError, run_tasks
from resihp_ext.reproduce.ratios import geometric, over
from resihp_ext.reproduce.scenarios import FREQUENCIES, MIXED, SCENARIOS, STOP
from resihp_ext.scheduler.decide import decide
from resihp_ext.scheduler.predict import memory_bytes
from resihp_ext.simulator.capacity import capacity_ratio
from resihp_ext.simulator.happenings import Happening
from resihp_ext.simulator.health import Health
from resihp_ext.simulator.policies.registry import POLICIES, policy_named
from resihp_ext.simulator.presets import CONFIGURATIONS, has_room, setting

pytestmark = pytest.mark.unit

SMALL_LIMIT_S = 60.0
CLAIM = {"quantity": "q", "values": (2.0, 3.0)}


@dataclass(frozen=True, kw_only=True)
class Sum:
    """A task that may fail or take its time."""

    numbers: tuple[int, ...]
    takes_s: float = 0.0

    def run(self) -> int:
        time.sleep(self.takes_s)
        if not self.numbers:
            raise ZeroDivisionError("nothing to add")
        return sum(self.numbers)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# Settings.


def test_configurations_are_the_papers() -> None:
    assert {one.model for one in CONFIGURATIONS.values()} == {
        *("llama2-7b", "llama2-13b", "llama2-30b", "llama2-70b"),
        *("qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b"),
    }
    devices = [one.devices for one in CONFIGURATIONS.values()]
    assert (min(devices), max(devices)) == (16, 256)
    lengths = {one.seq_length for one in CONFIGURATIONS.values()}
    assert lengths == {8192, 16384, 32768}
    largest = CONFIGURATIONS["llama2-70b-8k"]
    assert (largest.tp, largest.dp, largest.pp) == (4, 4, 16)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_layouts_fit_with_room_for_an_exclusion(name: str) -> None:
    one = setting(name)
    problem = one.problem(Health(), one.nominal)
    assert max(memory_bytes(problem, one.nominal).values()) <= one.cluster.memory_bytes
    assert has_room(one)
    dead = Health.of({one.nominal.replicas[0].ranks[0]: 0.0})
    plan = decide(one.problem(dead, one.nominal), "progressive").plan
    assert len(plan.replicas) == len(one.nominal.replicas)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UserError, match="llama2-13b-16k"):
        setting("llama3")
    with pytest.raises(UserError, match="progressive"):
        policy_named("best")
    with pytest.raises(UserError, match="ablation"):
        chosen(["figure-11"])


# Bounds and ratios.


def test_capacity_is_the_mean_of_throughputs() -> None:
    happenings = [
        Happening(at_s=10, p=((0, 0.0),)),
        Happening(at_s=20, p=((1, 0.5),)),
        Happening(at_s=30, p=((0, 1.0), (1, 1.0))),
        Happening(at_s=99, p=((2, 0.0),)),
    ]
    # 4 devices: 40 + 30 + 25 + 40 device-seconds of 160.
    assert capacity_ratio(happenings, 4, until_s=40) == pytest.approx(135 / 160)
    assert capacity_ratio(happenings, 4, begin_s=15, until_s=30) == pytest.approx(40 / 60)
    assert capacity_ratio([], 4, until_s=40) == 1


def test_ratios() -> None:
    assert over(0.9, 0.6) == pytest.approx(1.5)
    assert over(0.5, 0.0) == 500
    assert geometric([1, 4]) == pytest.approx(2)
    assert middle(1, 4) == 2
    assert middle(0, 3) == 3
    assert middle(inf, -inf) is None


@pytest.mark.parametrize(
    ("paper", "verdict"),
    [
        ((1.0, 4.0), "inside"),
        ((2.5, 4.0), "overlaps"),
        ((1.0, 1.5), "above"),
        ((4.0, 5.0), "below"),
    ],
)
def test_verdicts(paper: tuple[float, float], verdict: str) -> None:
    assert Claim(**CLAIM, paper=paper).verdict == verdict
    assert Claim(quantity="q", values=(), paper=paper).verdict == "not run"


# Scenarios and cases.


@pytest.mark.parametrize("scenario", [*SCENARIOS, *FREQUENCIES], ids=lambda one: one.name)
def test_scenarios_are_drawn_from_their_seed(scenario) -> None:
    one = setting("llama2-13b-16k")
    drawn = scenario.drawn(one, 10.0, 3)
    assert drawn == scenario.drawn(one, 10.0, 3)
    assert drawn != scenario.drawn(one, 10.0, 4)
    assert drawn.begin_s == drawn.happenings[0].at_s
    assert all(drawn.begin_s <= h.at_s < drawn.until_s for h in drawn.happenings)


def test_faults_leave_detectors_time_to_settle() -> None:
    drawn = STOP.drawn(setting("llama2-30b-16k"), 60.0, 0)
    # 100 iterations of 60 s, less three standard deviations.
    assert drawn.begin_s > 0.25 * 6000
    assert len(drawn.happenings) == 2


def test_case_is_the_same_again_and_below_the_bound() -> None:
    case = Case(configuration="llama2-13b-16k", scenario=MIXED, seed=1, policies=("none", "joint"))
    runs = case.run()
    assert runs == case.run()
    nothing, joint = runs.ran
    assert 0 <= nothing.goodput_ratio < joint.goodput_ratio < 1
    assert joint.changes >= 1


def test_ablated_planner_leaves_out_its_steps() -> None:
    one = setting("llama2-13b-16k")
    slow = Health.of({0: 0.5})
    plans = {}
    for name in ABLATED:
        policy = made(name)
        problem = policy.problem(_view(one, slow), policy.begin(one))
        plans[name] = decide(problem, "progressive").plan
    whole = one.nominal.replicas
    assert plans["no step"].replicas == whole
    assert plans["no step"].routes == one.nominal.routes
    assert plans["exclusion"].replicas[0].stages[0].tp < 4
    assert plans["exclusion"].replicas[0].stages[0].depth == whole[0].stages[0].depth
    assert plans["repartition"].replicas[0].stages[0].tp == 4
    assert plans["repartition"].replicas[0].stages[0].depth < whole[0].stages[0].depth
    assert plans["migration"].replicas == whole
    assert plans["migration"].routes != one.nominal.routes
    everything = decide(one.problem(slow, one.nominal), "progressive").plan
    assert plans[" + ".join(STEPS)].replicas == everything.replicas


def _view(one, health):
    from resihp_ext.simulator.layout import Layout
    from resihp_ext.simulator.policy import Cause, View

    layout = Layout(plan=one.nominal)
    return View(setting=one, cause=Cause.SLOW, layout=layout, health=health, now_s=0.0)


# The pool.


def test_pool_gives_the_same_whatever_the_number_of_processes() -> None:
    tasks = [Sum(numbers=(one, 1)) for one in range(5)] + [Sum(numbers=(0, 1))]
    seen: list[int] = []
    one = run_tasks(tasks, jobs=1, limit_s=60, done=seen.append)
    two = run_tasks(tasks, jobs=2, limit_s=60)
    assert list(one.items()) == list(two.items())
    assert seen == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("jobs", [1, 2])
def test_pool_says_which_task_failed(jobs: int) -> None:
    with pytest.raises(ReproduceError, match=r"Sum\(numbers=\(\).*ZeroDivisionError: nothing"):
        run_tasks([Sum(numbers=(1,)), Sum(numbers=())], jobs=jobs, limit_s=60)


@pytest.mark.parametrize("jobs", [1, 2])
def test_pool_is_bounded(jobs: int) -> None:
    tasks = [Sum(numbers=(one,), takes_s=1.0) for one in range(8)]
    begin_s = time.monotonic()
    with pytest.raises(ReproduceError, match="limit of time"):
        run_tasks(tasks, jobs=jobs, limit_s=1.5)
    assert time.monotonic() - begin_s < 6


# The page and the command.


def test_pictures_show_values() -> None:
    bars = Bars(title="B", unit="x", groups=("g",), series=(("s", (1.0,)), ("n", (None,))))
    lines = Lines(title="L", unit="y", across="x", x=(1.0, 2.0), series=(("s", (1.0, 2.0)),))
    assert all(one.startswith("<svg") for one in (picture(bars), picture(lines)))


@pytest.mark.timeout(180)
def test_small_run_makes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin_s = time.monotonic()
    assert main(["reproduce", "--all", "--small", "--out", str(tmp_path)]) == 0
    assert time.monotonic() - begin_s < SMALL_LIMIT_S
    assert "wrote" in capsys.readouterr().out
    for name in PARTS:
        found = rows_of(tmp_path / f"{name}.csv")
        assert found or name in ("losses", "sensitivity"), name
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "small: no reproduction" in page
    assert "<svg" in page
    assert 'src="http' not in page
    policies = {row["policy"] for row in rows_of(tmp_path / "fail-stop.csv")}
    assert policies == set(POLICIES)
    for row in rows_of(tmp_path / "claims.csv"):
        assert row["verdict"] in ("inside", "overlaps", "above", "below")


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    wanted = ["reproduce", "--only", "amplification,frequency", "--small"]
    for jobs in ("1", "2"):
        assert main([*wanted, "--jobs", jobs, "--out", str(tmp_path / jobs)]) == 0
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / jobs).iterdir()} for jobs in "12"
    )
    assert one == two
    assert "report.html" in one


def test_loss_curves_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curves = tmp_path / "curves.csv"
    curves.write_text("step,with_failures,without\n1,5.0,5.0\n2,4.0,4.4\n", encoding="utf-8")
    wanted = ["reproduce", "--only", "losses", "--losses", str(curves)]
    assert main([*wanted, "--out", str(tmp_path / "out")]) == 0
    (claim,) = rows_of(tmp_path / "out" / "claims.csv")
    assert claim["verdict"] == "above"
    assert float(claim["ours_high"]) == pytest.approx(0.4 / 4.4, rel=1e-5)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out", "x"], "either --all or --only"),
        (["--all", "--only", "ladder", "--out", "x"], "either --all or --only"),
        (["--only", "table-4", "--out", "x"], "choose of predictor"),
        (["--only", "losses", "--losses", "none.csv", "--out", "x"], "loss_curves.py"),
        (["--only", "losses", "--losses", "none.csv", "--real", "--out", "x"], "one of them"),
        (["--all"], "--out"),
    ],
)
def test_bad_flags_are_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *arguments]) == 2
    err = capsys.readouterr().err
    (line,) = [one for one in err.splitlines() if one.startswith("error: ")]
    assert said in line
