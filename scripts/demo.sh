#!/usr/bin/env bash
# Trains one job twice on Python's standard library: once in peace, once on eight CPU ranks (TP 2 x
# PP 2 x DP 2) of which it kills three. Then it shows what happened, and compares every loss.
# Last line: "demo: OK ..." or "demo: FAILED ...".
set -euo pipefail
cd "$(dirname "$0")/.."

readonly work=.demo steps=44 python=.venv/bin/python
started=$(date +%s)
mkdir -p "$work"

say() { echo "demo: $*"; }
fail() { say "FAILED after $(($(date +%s) - started)) s: $*"; exit 1; }

job=
# An interrupted demo leaves no ranks behind.
trap '[ -z "$job" ] || kill "$job" 2>/dev/null || true' EXIT

# train NAME [flags of resihp-run] -- [flags of pretrain_gpt.py]: starts a job in the background.
# The rate is one at which rounding does not grow into other figures within these steps.
train() {
    local name=$1 launcher=()
    shift
    while [ "$1" != -- ]; do launcher+=("$1"); shift; done
    shift
    rm -rf "${work:?}/$name"
    .venv/bin/resihp-run "${launcher[@]}" pretrain_gpt.py --preset tiny --device cpu \
        --data-path "$work/stdlib" --split 98,2,0 --packed-sequences --eval-iters 0 \
        --train-iters "$steps" --lr 3e-4 --min-lr 3e-4 \
        --resilience --resilience-dir "$work/$name" "$@" >"$work/$name.log" 2>&1 &
    job=$!
}

ended() {
    wait "$job" || { tail -n 15 "$work/$1.log"; fail "a job of the demo, see $work/$1.log"; }
    job=
}

say "1/4 Python's standard library becomes a dataset"
"$python" tools/preprocess_data.py --stdlib --format python --limit-mb 8 \
    --output-prefix "$work/stdlib" --overwrite >"$work/data.log" 2>&1 ||
    { tail -n 5 "$work/data.log"; fail "see $work/data.log"; }
sed -n 's/^wrote/  wrote/p' "$work/data.log"

say "2/4 $steps steps in peace, on two ranks with Megatron's own schedule; log: $work/reference.log"
train reference --nproc-per-node 2 -- --resilience-observe-only
ended reference

say "3/4 the same steps on eight ranks; log: $work/train.log. These faults are on purpose:"
# Ranks 2 and 6 are a whole stage of a replica by then, see plan 1 below.
cat >"$work/faults.yaml" <<'YAML'
- {at_step: 5, phase: backward, rank: 3, kind: kill}
- {at_step: 8, phase: forward, rank: 2, kind: kill}
- {at_step: 8, phase: forward, rank: 6, kind: kill}
YAML
sed 's/^/  /' "$work/faults.yaml"
# A node that loses three workers gets no new ones, normally: here it is meant to.
train train --nproc-per-node 8 --control-conf deaths=9 -- --sequence-parallel \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
    --resilience-faults "$work/faults.yaml"
good=1
"$python" tools/follow_run.py "$work/train" --steps "$steps" --pid "$job" || good=
ended train

say "4/4 what happened (resihp receipts $work/train): ranks and layers of the stages, seconds"
.venv/bin/resihp receipts "$work/train"
say "the loss of every step, compared with the run in peace"
"$python" tools/compare_runs.py "$work/train" "$work/reference" || good=
[ -n "$good" ] || fail "see above"
say "OK in $(($(date +%s) - started)) s"
