"""Figure 12 from real jobs: the loss of every step with dead devices, and without.

    .venv/bin/python scripts/paper/loss_curves.py --out losses.csv [--runs DIR REFERENCE]

Runs the demo (``scripts/demo.sh``, about three minutes on two cores), which trains the same steps
twice, once while three of eight ranks are killed; or takes two ``--resilience-dir`` folders of jobs
that have run. The file is for ``resihp reproduce --losses``.

Exit code 0 when written; 1 when the jobs failed or ran different steps.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from pathlib import Path

from megatron.resilience.testing.chaos.ledger import read_ledger
from resihp_ext.reproduce.losses import COLUMNS

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900.0


def curves(directory: Path, reference: Path) -> list[tuple[int, float, float]]:
    """Steps and both losses.

    Raises:
        ValueError: the two have not run the same steps.
    """
    ledgers = [read_ledger(directory), read_ledger(reference)]
    problems = [text for ledger in ledgers for text in ledger.problems]
    with_, without = (ledger.losses for ledger in ledgers)
    if problems or not with_ or with_.keys() != without.keys():
        counts = f"{len(with_)} steps with failures, {len(without)} without"
        raise ValueError("; ".join([*problems, counts]))
    return [(step, with_[step], without[step]) for step in sorted(with_)]


def main() -> int:
    """Runs or reads, and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    parser.add_argument("--runs", type=Path, nargs=2, help="with failures, and without")
    options = parser.parse_args()
    folders = options.runs or (ROOT / ".demo" / "train", ROOT / ".demo" / "reference")
    if not options.runs:
        command = ["bash", str(ROOT / "scripts" / "demo.sh")]
        try:
            ended = subprocess.run(command, cwd=ROOT, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            print(f"FAILED: the demo has not ended within {LIMIT_S:.0f} s", file=sys.stderr)
            return 1
        if ended.returncode:
            print(f"FAILED: the demo ended with {ended.returncode}", file=sys.stderr)
            return 1
    try:
        rows = curves(*folders)
    except ValueError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)
    print(f"wrote {options.out}: {len(rows)} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
