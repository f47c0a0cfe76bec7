"""A worker that hangs says where; one that goes on says nothing; none of them comes to harm."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.unit

LIMIT_S = 60.0


def run(text: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: what is asked is whether it lives, and what it writes."""
    begin = "from megatron.resilience.recovery.stacks import Stacks\nimport time\n"
    words = [sys.executable, "-c", begin + textwrap.dedent(text)]
    return subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)


def test_who_hangs_says_where() -> None:
    ended = run("""
        def waits_for_a_partner():
            time.sleep(1.0)
        Stacks(0.2).begin()
        waits_for_a_partner()
    """)
    assert ended.returncode == 0
    assert "in waits_for_a_partner" in ended.stderr


def test_who_goes_on_in_time_says_nothing() -> None:
    ended = run("""
        stacks = Stacks(0.2)
        stacks.end()
        for _ in range(3):
            stacks.begin()
        stacks.end()
        time.sleep(0.6)
    """)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_worker_whose_stacks_change_meanwhile_comes_to_no_harm() -> None:
    """With the C library's watchdog this ended by SIGSEGV within seconds."""
    ended = run("""
        def deep(n):
            return deep(n - 1) if n else sum(x for x in range(50))
        def changing():
            for i in range(20):
                exec(f"def f{i}(): return deep({i})\\nf{i}()", globals())
                yield i
        end_s, stacks = time.monotonic() + 4.0, Stacks(0.0002)
        while time.monotonic() < end_s:
            stacks.begin()
            for _ in range(50):
                list(changing())
        print("lives")
    """)
    assert (ended.returncode, ended.stdout) == (0, "lives\n"), ended.stderr[-500:]
    assert ended.stderr.count("in changing") > 10
