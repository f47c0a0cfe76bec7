"""Every change made to an installed upstream, one module a symbol, and nothing else.

``apply_for(device)`` applies what that device needs, all or nothing; ``undo_all`` leaves no trace;
``report`` says, without applying anything, whether each patch fits what is installed.
"""

from __future__ import annotations

from megatron.resilience.device.patches.checkpoint_worker import CheckpointWorker
from megatron.resilience.device.patches.rng_state import RngState
from megatron.resilience.device.patches.tensor_cuda import TensorCuda
from megatron.resilience.device.patches.tensor_type import TensorType
from megatron.resilience.device.patches.torch_name import TorchName
from megatron.resilience.patches.base import Patch, PatchStatus
from megatron.resilience.patches.compile_helpers import CompileHelpers
from megatron.resilience.patches.distributed_adam import DistributedAdam
from megatron.resilience.patches.group_birth import GroupBirth
from megatron.resilience.patches.local_timers import LocalTimers
from megatron.resilience.patches.lost_checkpoint_worker import LostCheckpointWorker
from megatron.resilience.patches.partner_waits import PartnerWaits
from megatron.resilience.patches.tensorboard_writer import TensorboardWriter
from megatron.resilience.patches.training_log import TrainingLog
from megatron.resilience.patches.training_loop import TrainingLoop

KINDS: tuple[type[Patch], ...] = (
    CompileHelpers,
    DistributedAdam,
    TrainingLog,
    TrainingLoop,
    TorchName,
    TensorCuda,
    TensorType,
    RngState,
    CheckpointWorker,
    LostCheckpointWorker,
    GroupBirth,
    LocalTimers,
    TensorboardWriter,
    PartnerWaits,
)


class PatchSet:
    """The patches one process has applied; the owner undoes them with :meth:`undo_all`."""

    def __init__(self) -> None:
        self.training_log = TrainingLog()
        self.training_loop = TrainingLoop()
        self.group_birth = GroupBirth()
        self.local_timers = LocalTimers()
        self.tensorboard_writer = TensorboardWriter()
        self.partner_waits = PartnerWaits()
        kept: dict[type[Patch], Patch] = {
            GroupBirth: self.group_birth,
            LocalTimers: self.local_timers,
            PartnerWaits: self.partner_waits,
            TensorboardWriter: self.tensorboard_writer,
            TrainingLog: self.training_log,
            TrainingLoop: self.training_loop,
        }
        self._patches = tuple(kept.get(kind) or kind() for kind in KINDS)

    def apply_for(self, device: str) -> tuple[str, ...]:
        """Applies every patch that ``device`` ("cpu" or "cuda") needs; returns their symbols.

        Raises:
            UpstreamDriftError: one does not fit; those already applied are undone first.
        """
        chosen = [patch for patch in self._patches if device in patch.devices]
        try:
            for patch in chosen:
                patch.apply()
        except BaseException:
            self.undo_all()
            raise
        return tuple(patch.symbol for patch in chosen)

    def undo_all(self) -> None:
        """Restores every symbol, last applied first."""
        for patch in reversed(self._patches):
            patch.undo()


def report(device: str = "cpu") -> list[PatchStatus]:
    """Checks every patch against the installed upstream for ``device``, applying none."""
    return [_status(kind(), device) for kind in KINDS]


def _status(patch: Patch, device: str) -> PatchStatus:
    if device not in patch.devices:
        return PatchStatus(symbol=patch.symbol, status="not needed", detail=f"on {device}")
    problem = patch.problem()
    status = "drifted" if problem else "applies"
    return PatchStatus(symbol=patch.symbol, status=status, detail=problem or patch.reason)
