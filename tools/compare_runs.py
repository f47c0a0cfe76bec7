"""Compares the loss of every step of two runs of the same job.

    .venv/bin/python tools/compare_runs.py DIR REFERENCE [--bound 1e-5]

Both are ``--resilience-dir`` folders; a step that was done again counts as its last time. Exit code
0 when both ran the same steps and no relative difference is above the bound; else 1.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from megatron.resilience.testing.chaos.ledger import read_ledger

BOUND = 1e-5
COLUMNS = 4


def table(found: dict[int, float], reference: dict[int, float]) -> list[str]:
    """Step, loss, and relative difference, some steps a line."""
    cells = [
        f"{step:5}  {found[step]:.5f}  {difference(found[step], reference[step]):.1e}"
        for step in sorted(found)
    ]
    rows = -(-len(cells) // COLUMNS)
    columns = min(COLUMNS, -(-len(cells) // rows))
    heading = "   ".join([" step     loss    diff."] * columns)
    return [heading, *("   ".join(cells[row::rows]) for row in range(rows))]


def difference(one: float, other: float) -> float:
    """Relative to the other; infinite where there is NaN, which Python's ``max`` passes over."""
    found = abs(one - other) / abs(other)
    return math.inf if math.isnan(found) else found


def main() -> int:
    """Compares the runs that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("reference", type=Path)
    parser.add_argument("--bound", type=float, default=BOUND, help="largest relative difference")
    options = parser.parse_args()
    ledgers = [read_ledger(options.directory), read_ledger(options.reference)]
    found, reference = (ledger.losses for ledger in ledgers)
    problems = [text for ledger in ledgers for text in ledger.problems]
    if not found or found.keys() != reference.keys():
        problems.append(f"{len(found)} steps, {len(reference)} in the reference")
    if problems:
        print(f"FAILED: {'; '.join(problems)}")
        return 1
    print("\n".join(table(found, reference)))
    worst = max(found, key=lambda step: difference(found[step], reference[step]))
    most = difference(found[worst], reference[worst])
    good = most <= options.bound
    print(
        f"{'OK' if good else 'FAILED'}: the loss of {len(found)} steps differs by {most:.1e} at "
        f"most (step {worst}); the bound is {options.bound:.0e}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
