"""Patch: let a plan's executor stand for Megatron's schedule and optimizer in its training loop.

Symbol: ``get_forward_backward_func``, ``get_megatron_optimizer``, ``is_pp_last_stage``,
``consume_seqlen_stats_in_iteration``, ``train``, ``save_checkpoint``, ``print_datetime`` and
``checkpoint_and_decide_exit`` of ``megatron.training.training``.
Versions: megatron-core 0.19.x, on every device; without an executor, upstream's own are called.
Reason: upstream's schedules know one neighbour a stage, and so no routes; its optimizer takes
groups only from global state; loss and workload of a step are summed over replicas of one shape;
what meets other ranks must be done again when one of them dies in it.
Delete when: ``pretrain`` takes a schedule and an optimizer as it takes a communicator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

from megatron.resilience.patches.base import Patch, signature_drift, upstream_module

_MODULE = "megatron.training.training"


GROUPS_OF_A_SAVE = {
    "tp_group": "tp",
    "pp_group": "pp",
    "dp_group": "dp",
    "dp_cp_group": "dp_cp_gtp_remat",
    "expt_dp_group": "expt_dp",
}
"""Arguments of upstream's saving, and their names in the collection of groups."""


class StepExecutor(Protocol):
    """What the training loop needs of an executor."""

    @property
    def forward_backward(self) -> Callable[..., list[Any]]: ...

    def build_optimizer(self, config: Any, models: Any, overrides: Any) -> Any: ...

    def sequence_stats(self, local: Any) -> tuple[float, float]: ...

    @property
    def before_training(self) -> Callable[[Any], None]: ...

    @property
    def groups(self) -> Any: ...

    @property
    def guard(self) -> Any: ...

    @property
    def saved(self) -> Callable[[int], None]: ...

    @property
    def saving(self) -> Any: ...

    @property
    def clock(self) -> Any: ...


class TrainingLoop(Patch):
    """Asks ``executor`` instead of upstream, when there is one."""

    symbol = f"{_MODULE} schedule, optimizer, sums of a step"
    reason = "a plan's executor runs the steps"
    delete_when = "pretrain takes a schedule and an optimizer"
    devices = frozenset({"cpu", "cuda"})

    def __init__(self) -> None:
        super().__init__()
        self.executor: StepExecutor | None = None

    def drift(self) -> str | None:
        module = upstream_module(_MODULE)
        return (
            signature_drift(
                module.get_forward_backward_func, "pp_size, vp_size, schedule_pg_collection"
            )
            or signature_drift(module.is_pp_last_stage, "pp_group")
            or signature_drift(module.consume_seqlen_stats_in_iteration, "")
            or signature_drift(module.print_datetime, "string, override_timestamp")
            or _lacks(module.train, "opt_param_scheduler")
            or _lacks(module.save_checkpoint, "iteration", "non_persistent_ckpt", *GROUPS_OF_A_SAVE)
            or _lacks(module.checkpoint_and_decide_exit, "iteration")
            or signature_drift(
                module.get_megatron_optimizer,
                "config, model_chunks, config_overrides, use_gloo_process_groups, "
                "pg_collection, dump_param_to_param_group_map",
            )
        )

    def install(self) -> None:
        module = upstream_module(_MODULE)
        for name in (
            "schedule",
            "optimizer",
            "last_stage",
            "stats",
            "train",
            "save",
            "exit",
            "date",
        ):
            symbol, stand_in = getattr(self, f"_{name}")(module)
            self.replace(module, symbol, stand_in)

    def _schedule(self, module: Any) -> tuple[str, Any]:
        original = module.get_forward_backward_func

        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
            if self.executor is None:
                return original(*args, **kwargs)
            return self.executor.forward_backward

        return "get_forward_backward_func", get_forward_backward_func

    def _optimizer(self, module: Any) -> tuple[str, Any]:
        original = module.get_megatron_optimizer

        def get_megatron_optimizer(config: Any, model_chunks: Any, **kwargs: Any) -> Any:
            if self.executor is None:
                return original(config, model_chunks, **kwargs)
            overrides = kwargs.get("config_overrides")
            return self.executor.build_optimizer(config, model_chunks, overrides)

        return "get_megatron_optimizer", get_megatron_optimizer

    def _last_stage(self, module: Any) -> tuple[str, Any]:
        original = module.is_pp_last_stage

        def is_pp_last_stage(pp_group: Any) -> bool:
            # The loop asks who has the loss of a step: with an executor, every rank.
            return self.executor is not None or bool(original(pp_group))

        return "is_pp_last_stage", is_pp_last_stage

    def _train(self, module: Any) -> tuple[str, Any]:
        original = module.train

        def train(*args: Any, **kwargs: Any) -> Any:
            if self.executor is not None:
                found = inspect.signature(original).bind(*args, **kwargs).arguments
                self.executor.before_training(found["opt_param_scheduler"])
            return original(*args, **kwargs)

        return "train", train

    def _save(self, module: Any) -> tuple[str, Any]:
        original = module.save_checkpoint
        from megatron.resilience.upstream.arguments import current_args

        def save_checkpoint(*args: Any, **kwargs: Any) -> None:
            if self.executor is None:
                original(*args, **kwargs)
                return
            executor = self.executor

            def save() -> None:
                # Those that the caller has looked up may be of an earlier layout by now.
                for name, group in GROUPS_OF_A_SAVE.items():
                    if name in kwargs:
                        kwargs[name] = getattr(executor.groups, group)
                original(*args, **kwargs)

            step = int(args[0] if args else kwargs["iteration"])
            with executor.clock.apart():
                whole = executor.saving.run(
                    executor.guard, save, step=step, directory=str(current_args().save)
                )
            if whole and not kwargs.get("non_persistent_ckpt") and not kwargs.get("release"):
                executor.saved(step)

        return "save_checkpoint", save_checkpoint

    def _exit(self, module: Any) -> tuple[str, Any]:
        original = module.checkpoint_and_decide_exit
        from megatron.resilience.upstream.arguments import current_args

        def checkpoint_and_decide_exit(*args: Any, **kwargs: Any) -> bool:
            if self.executor is None:
                return bool(original(*args, **kwargs))
            told = current_args()
            (leaves,) = self.executor.guard.run(
                "exit",
                lambda: (float(bool(original(*args, **kwargs))),),
                # Otherwise nobody is met here: a rank that is through proves nothing of the others.
                ends=bool(told.exit_signal_handler or told.exit_duration_in_mins),
            )
            return bool(leaves)

        return "checkpoint_and_decide_exit", checkpoint_and_decide_exit

    def _date(self, module: Any) -> tuple[str, Any]:
        original = module.print_datetime

        def print_datetime(*args: Any, **kwargs: Any) -> None:
            if self.executor is None:
                original(*args, **kwargs)
                return

            def attempt() -> tuple[float, ...]:
                original(*args, **kwargs)
                return ()

            self.executor.guard.run("meeting", attempt)

        return "print_datetime", print_datetime

    def _stats(self, module: Any) -> tuple[str, Any]:
        original = module.consume_seqlen_stats_in_iteration
        from megatron.resilience.upstream.batch import is_packed

        def consume_seqlen_stats_in_iteration() -> Any:
            if self.executor is None:
                return original()
            local, module._seqlen_stats_active = module._seqlen_stats_in_iteration, False
            module._seqlen_stats_in_iteration = None
            return self.executor.sequence_stats(local) if is_packed() else (None, None)

        return "consume_seqlen_stats_in_iteration", consume_seqlen_stats_in_iteration


def _lacks(function: Callable[..., Any], *names: str) -> str | None:
    missing = set(names) - inspect.signature(function).parameters.keys()
    return f"{function.__qualname__} has no {sorted(missing)}" if missing else None
