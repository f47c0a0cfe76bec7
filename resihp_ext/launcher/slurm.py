"""What Slurm knows, as flags of torchrun: ``srun resihp-run ...`` on several nodes needs no more.

One task a node is one launcher. The first node of the step hosts the rendezvous; its address is
the one that Slurm itself uses for it, because a node's name in Slurm need not be known to DNS.
Whoever gives a rendezvous of their own gets exactly that.

Imports neither torch nor Megatron.
"""

import re
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

from resihp_ext.errors import UserError

# What torchrun's parser says when nothing was typed.
NNODES_DEFAULT = "1:1"
ID_DEFAULT = "none"
MASTER_DEFAULT = "127.0.0.1"

FIRST_PORT = 15000
PORTS = 15000
"""Above the ports of services, below those that Linux gives to outgoing connections (32768)."""
STEPS = 16
"""Steps of one job that get ports of their own."""

SCONTROL_TIMEOUT_S = 60.0

Scontrol = Callable[..., str]


def slurm_defaults(environ: Mapping[str, str], scontrol: Scontrol) -> dict[str, str]:
    """Flags of torchrun, by their names, for a task of a step over several nodes; else nothing.

    ``scontrol`` runs Slurm's own tool with these words and returns what that prints.

    Raises:
        UserError: the step has several tasks a node, or Slurm does not tell its first node.
    """
    nodes = int(environ.get("SLURM_STEP_NUM_NODES") or 1)
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ or nodes == 1:
        return {}
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS") or nodes)
    if tasks != nodes:
        raise UserError(
            f"resihp-run: Slurm has started {tasks} tasks on {nodes} nodes, but one launcher "
            "starts all ranks of its node: srun --ntasks-per-node=1"
        )
    job, step = environ["SLURM_JOB_ID"], environ["SLURM_STEP_ID"]
    # A launcher that Slurm has not yet ended must not meet those of the requeued job.
    times = environ.get("SLURM_RESTART_COUNT") or "0"
    port = FIRST_PORT + (int(job) * STEPS + int(step)) % PORTS
    return {
        "nnodes": str(nodes),
        "rdzv_backend": "c10d",
        "rdzv_endpoint": f"{_first_node(environ['SLURM_STEP_NODELIST'], scontrol)}:{port}",
        "rdzv_id": f"slurm-{job}.{step}.{times}",
        # Said outright: torch would guess it from names and addresses.
        "rdzv_conf": f"is_host={int(environ['SLURM_PROCID'] == '0')}",
    }


def take_slurm_defaults(
    args: Any, environ: Mapping[str, str], scontrol: Scontrol | None = None
) -> None:
    """Fill parsed flags of torchrun with :func:`slurm_defaults` where the user gave none.

    Raises:
        UserError: as :func:`slurm_defaults`.
    """
    joins = args.standalone or args.rdzv_backend != "static" or args.rdzv_endpoint
    static = args.master_port is not None or args.master_addr != MASTER_DEFAULT or args.node_rank
    if joins or static or args.nnodes == "1":
        return
    found = slurm_defaults(environ, scontrol or run_scontrol)
    if args.nnodes != NNODES_DEFAULT:
        found.pop("nnodes", None)
    if args.rdzv_id != ID_DEFAULT:
        found.pop("rdzv_id", None)
    if found and args.rdzv_conf:
        found["rdzv_conf"] += f",{args.rdzv_conf}"  # of two values torch takes the later one
    for name, value in found.items():
        setattr(args, name, value)


def run_scontrol(*words: str) -> str:
    """What ``scontrol WORDS`` prints.

    Raises:
        UserError: it is missing or fails.
    """
    advice = "give --nnodes, --rdzv-backend c10d and --rdzv-endpoint HOST:PORT yourself"
    try:
        done = subprocess.run(
            ["scontrol", *words],
            capture_output=True,
            text=True,
            timeout=SCONTROL_TIMEOUT_S,
            check=True,
        )
    except FileNotFoundError:
        raise UserError(
            f"resihp-run: Slurm's scontrol is not on PATH (a container?); {advice}"
        ) from None
    except subprocess.SubprocessError as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        raise UserError(f"resihp-run: scontrol {' '.join(words)}: {said}; {advice}") from None
    return done.stdout


def _first_node(nodelist: str, scontrol: Scontrol) -> str:
    name = scontrol("show", "hostnames", nodelist).split()[0]
    address = re.search(r"\bNodeAddr=(\S+)", scontrol("show", "node", "--oneliner", name))
    return address[1] if address else name
