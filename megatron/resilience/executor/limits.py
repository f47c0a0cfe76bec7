"""What the executor cannot run yet, refused by name at start; and what it sets for upstream."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron.resilience.executor.place import Seat
from resihp_ext.errors import UserError
from resihp_ext.plan.plan import PlanError
from resihp_ext.plan.timetable import Entry

_REFUSED = {
    "fp16": "--fp16: use --bf16",
    "num_experts": "--num-experts",
    "overlap_grad_reduce": "--overlap-grad-reduce",
    "overlap_param_gather": "--overlap-param-gather",
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "use_torch_fsdp2": "--use-torch-fsdp2",
    "full_validation": "--full-validation",
    "multiple_validation_sets": "--multiple-validation-sets",
    "mtp_num_layers": "--mtp-num-layers",
    "defer_embedding_wgrad_compute": "--defer-embedding-wgrad-compute",
    "tp_comm_overlap": "--tp-comm-overlap",
    "fp8": "--fp8-format",
    "optimizer_cpu_offload": "--optimizer-cpu-offload",
    "use_precision_aware_optimizer": "--use-precision-aware-optimizer",
    "perform_rl_step": "--perform-rl-step",
    "iterations_to_skip": "--iterations-to-skip",
    "decrease_batch_size_if_needed": "--decrease-batch-size-if-needed",
    "async_save": "--async-save",
    "ckpt_assume_constant_structure": "--ckpt-assume-constant-structure",
    "log_straggler": "--log-straggler",
    "check_weight_hash_across_dp_replicas_interval": (
        "--check-weight-hash-across-dp-replicas-interval"
    ),
    "log_params_norm": "--log-params-norm",
    "wandb_project": "--wandb-project",
    "rampup_batch_size": "--rampup-batch-size (obsolete; give --step-batch-size-schedule)",
}


def refuse(args: argparse.Namespace, initial_weights: str) -> None:
    """Refuses flags that do not go with layouts of our own.

    Raises:
        UserError: names the flag.
    """
    found = [flag for name, flag in _REFUSED.items() if getattr(args, name, None)]
    if args.context_parallel_size > 1:
        found.append("--context-parallel-size")
    if args.optimizer not in ("adam", "sgd"):
        found.append(f"--optimizer {args.optimizer}")
    if args.cuda_graph_impl != "none":
        found.append("--cuda-graph-impl")
    if args.ckpt_format != "torch_dist":
        found.append(f"--ckpt-format {args.ckpt_format}")
    if args.non_persistent_ckpt_type == "local":
        found.append("--non-persistent-ckpt-type local")
    if initial_weights != "logical":
        found.append("--initial-weights upstream")
    if found:
        raise UserError(f"{', '.join(found)}: cannot be combined with --resilience")


def require_fit(
    entries: Sequence[Entry], args: argparse.Namespace, *, sequence_parallel: bool
) -> None:
    """Checks every plan of a timetable against the model, before anything is started.

    Raises:
        UserError: names the step, the ranks, and what does not divide.
    """
    sizes = {
        "attention heads": args.num_attention_heads,
        "query groups": args.num_query_groups or args.num_attention_heads,
        "FFN rows": args.ffn_hidden_size,
        "words of the padded vocabulary": args.padded_vocab_size,
        "tokens of a sequence": args.seq_length if sequence_parallel else 0,
    }
    for entry in entries:
        where = f"plan for step {entry.step}"
        for stage in (stage for one in entry.plan.replicas for stage in one.stages):
            for what, size in sizes.items():
                if size % stage.tp:
                    raise UserError(
                        f"{where}: {size} {what} do not divide by {stage.tp}, the number of ranks "
                        f"{list(stage.ranks)} of a stage"
                    )
        try:
            for device in entry.plan.devices:
                Seat.of(entry.plan, device.rank)
        except PlanError as error:
            raise UserError(f"{where}: {error}") from error


def prepare(args: argparse.Namespace) -> None:
    """Sets what follows from the executor doing it itself."""
    args.use_distributed_optimizer = False
    args.dataloader_type = "external"
    # The model's config finds it in the layout; the loop would build data once a chunk, which has
    # collectives, and ranks may have different numbers of chunks.
    args.virtual_pipeline_model_parallel_size = None
    # Both would exchange shards inside data-parallel groups, which hold one rank here.
    args.ckpt_fully_parallel_save = False
    args.ckpt_fully_parallel_load = False
    # Kept by upstream for a grid of ranks, which an uneven layout is not.
    args.no_save_rng = True
    args.no_load_rng = True
    # To decide about a rerun all ranks meet between the gradients and the vote, where a death
    # would not be survived; and a step that is repeated is no part of upstream's loop.
    args.rerun_mode = "disabled"
