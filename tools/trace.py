"""Draws where the time of a run's steps went: a trace for https://ui.perfetto.dev.

    .venv/bin/python tools/trace.py DIR -o trace.json

DIR is the ``--resilience-dir`` of a job with ``--resilience-timings-steps``, running or over. A
track is a rank: its actions with their micro-batches, waits in them, changes of the layout. Exit
code 0: written; 2: DIR is no such folder, with one line ``error: ...``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from resihp_ext.errors import EXIT_OK, EXIT_USAGE, UserError
from resihp_ext.telemetry.trace import measured_trace, write_trace


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("-o", "--out", type=Path, required=True, help="file to write")
    told = parser.parse_args(argv)
    try:
        trace = measured_trace(told.directory)
        write_trace(trace, told.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    slices = sum(one["ph"] == "X" for one in trace["traceEvents"])
    print(f"resihp: {told.out}: {slices} slices")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
