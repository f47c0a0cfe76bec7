"""Pretrains a GPT with Megatron: upstream's entry point plus the flags of this project.

    resihp-run --nproc-per-node 8 pretrain_gpt.py --preset tiny --data-path PREFIX ...

All Megatron flags pass through. ``--help`` lists them, ours under "Resilience", "Packed sequences",
"Layout", "Device", "Initial weights", "Checkpoint safety", "Faults on purpose", "Emulation",
"Timing", "Plans for slow devices" and "Recovery".
"""

import time

_PROGRAM_START_S = time.time()

import sys
from collections.abc import Sequence

from megatron.resilience.start import command_line, run_to_exit_code
from resihp_ext.launcher.warm import wait_if_warm


def main(argv: Sequence[str]) -> None:
    """Trains as the command line says; runs in every process of the job."""
    words = command_line(argv)

    # Only now: the environment of the chosen device stands.
    from megatron.core.enums import ModelType
    from megatron.training import pretrain, set_startup_timestamps

    from megatron.resilience.job import Job

    wait_if_warm()  # nothing but imports has happened: here a spare process waits, and forks
    set_startup_timestamps(program_start=_PROGRAM_START_S, main_entry=time.time())
    with Job(words) as job:
        pretrain(
            job.config,
            job.datasets,
            ModelType.encoder_or_decoder,
            job.forward_step,
            **job.options,
        )


if __name__ == "__main__":
    sys.exit(run_to_exit_code(main, sys.argv[1:]))
