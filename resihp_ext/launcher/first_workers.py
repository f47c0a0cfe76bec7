"""The first workers of a node, forked by its warm process where the script allows that.

Eight processes that import torch and Megatron at once read the same files eight times and fight for
the same processors; one process that imports once and forks eight workers is ready much sooner.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing import api as torchs_api

from resihp_ext.launcher.processes import AdoptedHandler
from resihp_ext.launcher.warm_process import State, Wanted, WarmProcess

logger = logging.getLogger(__name__)

READY_S = 180.0
"""For the imports of a script, also from a slow file system."""
FORK_S = 10.0
SIGN_OF_COOPERATION = "--resilience"
"""A script that is given this flag ends at once where it finds itself in a warm process and has
not said where its imports end; any other would train, a second time."""

Begin = Callable[[str, Sequence[Any], Mapping[str, str]], WarmProcess]


def may_be_forked(script_args: Sequence[Any]) -> bool:
    """Whether the script is known to cooperate."""
    return SIGN_OF_COOPERATION in script_args


@contextlib.contextmanager
def forked_handlers(begin: Begin) -> Iterator[None]:
    """Inside, workers that torch starts are forked; started as always where that fails.

    Args:
        begin: Gives the node's warm process, for program, arguments and environment of a worker.
    """
    api: Any = torchs_api
    start = api.get_subprocess_handler

    def handler(entrypoint: str, args: tuple[Any, ...], env: dict[str, str], **torchs: Any) -> Any:
        outputs = (torchs.get("stdout") or "", torchs.get("stderr") or "")
        # torch binds to NUMA nodes by a command of its own.
        if torchs.get("numa_options") is None and may_be_forked(args):
            warm = begin(entrypoint, args, env)
            pid = _fork(warm, Wanted(env, (), outputs))
            if pid is not None:
                return AdoptedHandler(pid)
        return start(entrypoint=entrypoint, args=args, env=env, **torchs)

    api.get_subprocess_handler = handler
    try:
        yield
    finally:
        api.get_subprocess_handler = start


def _fork(warm: WarmProcess, wanted: Wanted) -> int | None:
    """The pid of a worker; None where none can be had."""
    if warm.state is State.IMPORTING:
        warm.wait(READY_S)
    if not warm.ask(wanted):
        return None
    pid = warm.wait(FORK_S)
    if pid is None:
        logger.warning("the warm process did not fork within %g s", FORK_S)
        if warm.state is not State.NONE:
            warm.died()
    return pid
