#!/usr/bin/env bash
# Runs the soak tests that need a machine with GPUs and many processors, for a number of seconds. CPU and GPU tests run at the same
# time. Results go to TE_SOAK_RESULTS ($OUT, else build/soak). The page docs/reliability.md reads tools/soak/results.
#   tools/soak/all.sh 120
# TE_SOAK_FUZZER is the path of a fuzzer that was built with clang: TE_SOAK_SANITIZE= python tools/soak/parser.py build/fuzzer
set -euo pipefail
export VENV='' PYTHON=${PYTHON:-python3}
source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
seconds=${1:-120}
export TE_SOAK_RESULTS=${TE_SOAK_RESULTS:-${OUT:-$ROOT/build/soak}}
jobs=$(($(nproc) > 8 ? $(nproc) - 6 : 1))
soak() { "$py" tools/soak "$@" --write || echo "FAILED: soak $*"; }

on_processors() {
  soak parser --seconds $((2 * seconds / 3)) --jobs "$jobs"
  soak kills --seconds $((seconds / 3)) --jobs "$jobs"
  soak ops --seconds $((seconds / 5)) --jobs "$jobs"
  soak states --seconds $((seconds / 5)) --jobs "$jobs"
  soak documents --seconds $((seconds / 5)) --jobs "$jobs"
}
on_first_gpu() {
  soak memory --device cuda --seconds 30
  soak large --device cuda --seconds 1
}
on_last_gpu() {
  soak ops --device cuda --seconds $((seconds / 3)) --jobs 2
  soak kernels --device cuda --seconds 1
  soak hour --device cuda --seconds $((seconds / 3))
}

on_processors 2>&1 | sed 's/^/cpu: /' &
if has nvidia-smi; then
  last=$(($(nvidia-smi --list-gpus | wc -l) - 1))
  CUDA_VISIBLE_DEVICES=0 on_first_gpu 2>&1 | sed 's/^/first gpu: /' &
  CUDA_VISIBLE_DEVICES=$last on_last_gpu 2>&1 | sed 's/^/last gpu: /' &
fi
wait
