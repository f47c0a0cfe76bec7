"""One rank of a training job: everything that ``megatron.training.pretrain`` is handed.

Built before training starts, so that what is wrong is said before the first collective; owns what
has to be closed afterwards.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import logging
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch

from megatron.resilience.board_records import BoardRecords
from megatron.resilience.data.preflight import check_data, check_packing
from megatron.resilience.device.choose import Device, choose_device
from megatron.resilience.emulation.begin import begin_emulation
from megatron.resilience.executor.driver import TimetableDriver
from megatron.resilience.executor.modules import ModuleFactory
from megatron.resilience.executor.start import Planned, planned_layout
from megatron.resilience.iteration_records import IterationRecords
from megatron.resilience.model import initial_weights, packed_rotary
from megatron.resilience.model.layers import layer_spec
from megatron.resilience.patches.registry import PatchSet
from megatron.resilience.patches.training_log import Iteration
from megatron.resilience.preset import read_preset, with_defaults
from megatron.resilience.recovery.brief import brief
from megatron.resilience.recovery.member import StoppedError
from megatron.resilience.recovery.survive import Surroundings, Survivor
from megatron.resilience.reports import report_steps
from megatron.resilience.settings import Settings, add_our_flags
from megatron.resilience.upstream import arguments, parallel
from megatron.resilience.upstream.batch import MicroBatch
from megatron.resilience.upstream.board import Board
from megatron.resilience.upstream.datasets import DatasetProvider
from megatron.resilience.upstream.forward import ForwardStep
from megatron.resilience.upstream.origin import require_wheel
from megatron.resilience.upstream.resume import job_store, resolve_load
from megatron.resilience.upstream.rng import RngKeeper
from resihp_ext.control.worker_environment import WorkerEnvironment
from resihp_ext.environment import RankEnvironment
from resihp_ext.errors import EXIT_OK, CheckpointError, ResiHPError, UserError
from resihp_ext.events import Event, EventLog
from resihp_ext.launcher.warm import refuse_if_warm

logger = logging.getLogger(__name__)


class Job:
    """What one rank trains, with what, on what."""

    def __init__(self, argv: Sequence[str]) -> None:
        """Prepares a job from a command line whose presets are already resolved.

        Raises:
            UserError: anything that the user has to change; nothing was started.
            SystemExit: all steps are already done; with code 0.
            UpstreamDriftError: the installed Megatron is not one that the patches know.
        """
        refuse_if_warm()
        require_wheel()
        self.board: Board | None = None
        self.rank = RankEnvironment.from_environ(os.environ)
        self.patches = PatchSet()
        self.device = _choose_device(argv)
        self.patches.apply_for(self.device.kind)
        words = _with_device_preset(argv, self.device)
        self._agent = WorkerEnvironment.from_environ(os.environ)
        newcomer = self._agent is not None and self._agent.joins
        self.layout = planned_layout(words, _settings(argv), self.rank, newcomer=newcomer)
        self._newcomer = newcomer
        if isinstance(self.layout, Planned):
            self.board = Board(self.rank.rank, self._writers)
            self.patches.tensorboard_writer.board = self.board
        self.args = self.layout.parse(words, add_our_flags)
        self.settings = Settings.from_namespace(self.args)
        self._share_gpus()
        self.executor = self.layout.executor(self.args, self.settings, self._torch_device())
        self.patches.training_loop.executor = self.executor
        if self.executor is not None:
            self.executor.before_pass = self._forget_micro_batches
            self.executor.after_pass = self._record_micro_batches
            self.patches.partner_waits.clock = self.executor.clock
        self.patches.local_timers.local = self.executor is not None
        check_packing(self.args, self.settings.data)
        check_data(self.args)
        self.store = job_store(self.rank, 0 if self._agent is None else self._agent.attempt)
        self._resumed_step = self._find_checkpoint(newcomer)
        self.model_config, self.config = arguments.configurations(self.args)
        self.models: list[torch.nn.Module] = []
        self._customise_model()
        rng = RngKeeper()
        self.datasets = DatasetProvider(
            packed=self.settings.data.packed_sequences,
            everywhere=self.settings.resilience.resilience,
            rng=rng,
            by_number=self.executor is not None,
        )
        self.forward_step = ForwardStep(self._torch_device(), rng, self._on_micro_batch)
        self._micro_batches: list[MicroBatch] = []
        self._started = False
        self._step: int | None = None
        self.on_trained: Callable[[], None] | None = None
        self.events = self._open_events()
        report_steps(self.executor, self.events, self.settings.timing)
        self._scalars = BoardRecords(self.board, self.args, self.executor)
        self._iterations = IterationRecords(self.events, self.rank.rank)
        self.survivor = self._survive()
        self.patches.training_log.observer = self._on_iteration
        if self.rank.rank == 0 and not newcomer:
            print(self.device.banner, flush=True)  # noqa: T201 - the banner for people

    def __enter__(self) -> Self:
        if self.executor is not None:
            assert isinstance(self.layout, Planned)
            members = self.layout.members
            self.executor.join(
                members,
                backend=self.args.distributed_backend,
                store=self.store if len(members) > 1 else torch.distributed.HashStore(),
                timeout=timedelta(minutes=self.args.distributed_timeout_minutes),
            )
        return self

    @property
    def options(self) -> dict[str, Any]:
        """What ``pretrain`` takes by name."""
        if self.executor is None:
            return {"store": self.store}
        return {
            "store": self.store,
            "pg_collection": self.executor.groups,
            "skip_model_parallel_init": True,
        }

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: object
    ) -> None:
        # Upstream leaves its training loop by SystemExit at --exit-interval and the like.
        unsaved = None
        if kind is None or issubclass(kind, SystemExit):
            unsaved = self._unsaved()
            self._end(EXIT_OK if unsaved is None else unsaved.exit_code)
        if self.events is not None:
            self.events.close()
        if self.board is not None:
            self.board.close()
        self.patches.undo_all()
        if isinstance(error, AssertionError) and not self._started:
            # Upstream refuses flags and checkpoints by assertions, up to the first micro-batch.
            logger.debug("Megatron refused the job", exc_info=error)
            refusal = UserError(f"Megatron refuses the job: {arguments.reason_of(error)}")
            refusal.speaks = self._first_to_say(str(refusal))
            raise refusal from error
        if isinstance(error, ResiHPError):
            error.speaks = self._first_to_say(str(error))
            if self.survivor is not None and isinstance(error, StoppedError):
                self.survivor.leave(error.exit_code, str(error))
        if unsaved is not None:
            raise unsaved

    def _unsaved(self) -> CheckpointError | None:
        """What a job that could not save its last checkpoint ends with."""
        failed = None if self.executor is None else self.executor.saving.failed
        if failed is None:
            return None
        text = f"the last checkpoint, of step {failed.step}, could not be saved; see above"
        error = CheckpointError(text)
        error.speaks = self._first_to_say(text)
        return error

    def _first_to_say(self, text: str) -> bool:
        """Whether no other rank has met this very error yet; all speak when the store is gone."""
        key = f"resihp/said/{zlib.crc32(text.encode())}"
        try:
            return self.store.add(key, 1) == 1
        except RuntimeError:
            return True

    def _end(self, exit_code: int) -> None:
        if self.on_trained is not None:
            self.on_trained()
        if self.events is not None:
            self._iterations.complete(self._members())
            figures = {} if self.executor is None else self.executor.figures()
            self.events.write(Event.JOB_END, step=self._step, **figures)
        if self.survivor is not None:
            self.survivor.meet()
            self.survivor.leave(exit_code)
        elif torch.distributed.is_initialized():
            # Without the barrier a fast rank closes its sockets under a slower one's last message.
            torch.distributed.barrier()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def _leave_if_done(self, step: int) -> None:
        """Ends a job that was started once more after its last step, as a requeued batch job is.

        Raises:
            SystemExit: with code 0; upstream would fail for want of samples.
        """
        last = self.args.train_iters
        if last and step >= last and not self.args.skip_train:
            if self.rank.rank == 0:
                line = f"resihp: nothing to do: step {step} of {last} is already done"
                print(line, flush=True)  # noqa: T201 - a line for people
            raise SystemExit(EXIT_OK)

    def _share_gpus(self) -> None:
        """Lets several ranks of a node use one GPU, over gloo; NCCL cannot."""
        if self.device.kind == "cpu":
            return
        count = torch.cuda.device_count()
        if self.rank.local_world_size > count and self.args.distributed_backend == "nccl":
            raise UserError(
                f"{self.rank.local_world_size} ranks on {count} GPU(s): NCCL needs one GPU a rank; "
                "start fewer ranks, or share GPUs with --distributed-backend gloo"
            )
        # Upstream takes the local rank for the GPU's index.
        self.args.local_rank = self.rank.local_rank % count

    def _torch_device(self) -> torch.device:
        if self.device.kind == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", self.rank.local_rank % torch.cuda.device_count())

    def _find_checkpoint(self, newcomer: bool) -> int:
        """Agrees with the other ranks on a checkpoint; a newcomer gets its state from them."""
        if newcomer:
            self.args.load = None
            return 0
        step = resolve_load(self.args, self.settings.checkpoint, self.store, self.rank)
        self._leave_if_done(step)
        return step

    def _survive(self) -> Survivor | None:
        """Lets this rank change its layout: by its timetable, and when others are lost."""
        if self.executor is None or not isinstance(self.layout, Planned):
            return None
        factory = ModuleFactory(
            self.args, self._use_our_layers, sequence_parallel=self.layout.sequence_parallel
        )
        folder = resilience_dir(self.settings, self.args)
        layout, plans = self.layout, self.layout.timetable
        faults = begin_emulation(self.executor, self.settings, layout, self._agent, self.args)
        driver = TimetableDriver(self.executor, plans, factory, folder=folder, events=self.events)
        if self._agent is None:
            self.executor.before_step = driver
            if faults.real:
                raise UserError("--resilience-faults: start the job with resihp-run")
            return None
        return Survivor(
            self.executor,
            factory,
            self.patches,
            Surroundings(
                rank=self.rank,
                agent=self._agent,
                folder=folder,
                events=self.events,
                config=self.settings.recovery,
                faults=faults,
                timing=self.settings.timing,
                describe=lambda: brief(self.args, layout, self.device, self.settings),
                also=driver if len(plans) > 1 else None,
                level=self.settings.checkpoint.verify_checkpoint,
                initialise=functools.partial(
                    initial_weights.initialise,
                    seed=self.args.seed,
                    config=self.model_config.transformer,
                ),
            ),
        )

    def _use_our_layers(self, config: Any) -> None:
        """Puts our layers in, through upstream's own seams."""
        if self.args.transformer_impl == "local" and self.args.spec is None:

            def spec(model_config: Any, vp_stage: int | None = None) -> Any:
                return layer_spec(model_config, vp_stage, pp_rank=parallel.place().stage)

            config.transformer_layer_spec = spec
            config.pre_wrap_hooks.append(packed_rotary.install)

    def _customise_model(self) -> None:
        """Puts our layers and initial weights in."""
        config = self.model_config
        hooks = config.pre_wrap_hooks
        self._use_our_layers(config)
        if self.settings.initial_weights.initial_weights == "logical":
            hooks.append(functools.partial(initial_weights.initialise, seed=self.args.seed))
        config.post_wrap_hooks.append(self._keep_models)

    def _keep_models(self, models: list[torch.nn.Module]) -> list[torch.nn.Module]:
        self.models = models
        if self.events is not None and self.rank.rank == 0 and not self._newcomer:
            self.events.write(Event.JOB_START, step=self._resumed_step, **self._description())
        return models

    def _description(self) -> dict[str, Any]:
        versions = {name: importlib.metadata.version(name) for name in ("megatron-core", "torch")}
        return {
            "device": asdict(self.device),
            "versions": versions,
            "layout": parallel.parallel_sizes(),
            "world_size": self.rank.world_size,
            "emulated": self.settings.emulation.emulate is not None,
        }

    def _open_events(self) -> EventLog | None:
        if not self.settings.resilience.resilience:
            return None
        return EventLog(resilience_dir(self.settings, self.args), rank=self.rank.rank)

    def _on_micro_batch(self, batch: MicroBatch) -> None:
        # Model chunks of one rank see the same micro-batch; the one with the loss counts it.
        if self.executor is not None and batch.is_read:
            self.executor.clock.note(self.args.micro_batch_size, self.args.seq_length, batch.bounds)
        if batch.labels is not None:
            self._micro_batches.append(batch)
        self._started = True

    def _forget_micro_batches(self) -> None:
        """They were of an attempt that was broken off, or of a step that is recorded."""
        self._micro_batches = []

    def _record_micro_batches(self) -> None:
        self._write_micro_batches(int(arguments.current_args().curr_iteration) + 1)

    def _write_micro_batches(self, step: int) -> None:
        here = parallel.place()
        if self.events is None or here.tp_rank or here.stage != here.stages - 1:
            return
        tokens = self.args.micro_batch_size * self.args.seq_length
        self.events.write(
            Event.MICRO_BATCHES,
            step=step,
            plan=0 if self.executor is None else self.executor.plan.version,
            replica=here.replica if self.executor is None else self.executor.seat.replica,
            micro_batches=[
                {"tokens": tokens, "segments": batch.segments} for batch in self._micro_batches
            ],
        )

    def _on_iteration(self, iteration: Iteration) -> None:
        self._step = iteration.step
        if self.executor is None:
            self._write_micro_batches(iteration.step)
            self._forget_micro_batches()
        if self.events is not None:
            self._iterations.done(iteration, self._members())
        self._scalars.done(iteration.step, self.survivor)

    def _members(self) -> Sequence[int]:
        """Ranks that train together, ascending."""
        return range(self.rank.world_size) if self.executor is None else self.executor.world.members

    def _writers(self) -> Sequence[int]:
        """The same; none while this rank prepares alone for a job that it is to join."""
        joined = self.survivor is not None and self.survivor.recovery.has_changed
        return () if self._newcomer and not joined else self._members()


def resilience_dir(settings: Settings, args: argparse.Namespace) -> Path:
    """Where events, receipts and plans go: the flag, else beside ``--save``, else here."""
    chosen = settings.resilience.resilience_dir
    if chosen is not None:
        return Path(chosen)
    return Path(args.save).parent / "resilience" if args.save else Path("resilience")


def _settings(argv: Sequence[str]) -> Settings:
    """Our own settings, before Megatron's parser has run."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = arguments.refuse  # type: ignore[method-assign]
    add_our_flags(parser)
    known, _ = parser.parse_known_args(list(argv))
    return Settings.from_namespace(known)


def _choose_device(argv: Sequence[str]) -> Device:
    count = torch.cuda.device_count()
    return choose_device(
        _settings(argv).device,
        gpu_count=count,
        gpu_name=torch.cuda.get_device_name(0) if count else "",
    )


def _with_device_preset(argv: Sequence[str], device: Device) -> list[str]:
    return with_defaults(read_preset("cpu"), argv) if device.kind == "cpu" else list(argv)
