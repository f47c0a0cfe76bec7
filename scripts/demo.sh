#!/usr/bin/env bash
# Preprocesses Python's standard library and trains eight CPU ranks on it: TP 2 x PP 2 x DP 2,
# whole documents packed into variable-length segments. Last line: "demo: OK ...".
set -euo pipefail
cd "$(dirname "$0")/.."

readonly work=.demo steps=60
started=$(date +%s)
mkdir -p "$work"

echo "demo: 1/2 preprocessing the source code of Python's standard library"
.venv/bin/python tools/preprocess_data.py --stdlib --format python --limit-mb 8 \
    --output-prefix "$work/stdlib" --overwrite

echo "demo: 2/2 training $steps iterations on 8 ranks; the whole log is in $work/train.log"
rm -rf "$work/resilience"
.venv/bin/resihp-run --nproc-per-node 8 pretrain_gpt.py --preset tiny --device cpu \
    --data-path "$work/stdlib" --split 98,2,0 --packed-sequences --sequence-parallel \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
    --train-iters "$steps" --resilience --resilience-dir "$work/resilience" \
    >"$work/train.log" 2>&1 &
job=$!
# An interrupted demo leaves no ranks behind.
trap 'kill "$job" 2>/dev/null || true' EXIT
status=0
.venv/bin/python tools/follow_run.py "$work/resilience" --steps "$steps" --pid "$job" \
    --seconds-since "$started" || status=$?
wait "$job" || { tail -n 25 "$work/train.log"; echo "demo: FAILED, see $work/train.log"; exit 1; }
trap - EXIT
exit "$status"
