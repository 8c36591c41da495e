#!/usr/bin/env bash
# Runs the named checks, by default all, and ends with the time of each and the last lines of the test runners.
#   tools/steps.sh              runs all checks, as `make test` does
#   tools/steps.sh lint types   runs these two
#   tools/steps.sh --list       prints the names of all checks
# A check that cannot run prints the reason and is listed as skipped.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
STEPS=(lint types budget layering cpp_tests fuzz cuda_build build soak python_tests)
LOGS=$ROOT/build/logs
SKIPPED=77

skip() {
  printf 'SKIPPED: %s\n' "$*"
  exit $SKIPPED
}

sources() { git ls-files --cached --others --exclude-standard --deduplicate -- "$@" | while read -r f; do [ -e "$f" ] && echo "$f"; done; }

step_lint() {
  for tool in ruff clang-format shellcheck; do
    has "$tool" || skip "$tool is not installed"
  done
  ruff format --check .
  ruff check .
  "$py" tools/check_words.py
  sources '*.h' '*.cpp' '*.cu' '*.cuh' | xargs -r clang-format --dry-run -Werror
  { sources '*.sh'; echo .ci/run; } | xargs shellcheck -x
}

step_format() {
  ruff check --fix --exit-zero --quiet .
  ruff format .
  sources '*.h' '*.cpp' '*.cu' '*.cuh' | xargs -r clang-format -i
}

step_types() {
  has mypy || skip "mypy is not installed"
  mypy
}

step_budget() { "$py" tools/check_budget.py; }

step_layering() { "$py" tools/check_layering.py && "$py" tools/check_imports.py; }

# The core under AddressSanitizer (with leak detection) and UndefinedBehaviorSanitizer, with no Python in the process.
step_cpp_tests() {
  cmake --preset cpu-debug
  cmake --build --preset cpu-debug
  ctest --preset cpu-debug
}

# Reads mutated configurations for twenty seconds, under the same sanitizers.
step_fuzz() {
  cmake --preset cpu-debug
  cmake --build --preset cpu-debug --target config_fuzzer
  (cd build/cpu-debug && tests/fuzz/config_fuzzer "$ROOT/tests/fuzz/corpus" 20)
}

# Compiles the CUDA backend for Hopper, and a few kernels for all other GPUs, with warnings as errors; no GPU is needed.
# All files are compiled again (through the compiler cache), because check_ptxas.py needs the compiler's report on every kernel.
step_cuda_build() {
  has nvcc || [ -x /usr/local/cuda/bin/nvcc ] || skip "no nvcc on this machine"
  local headers=() report=$LOGS/ptxas.log
  if [ ! -e /usr/local/cuda/include/cublasLt.h ]; then
    mapfile -t headers < <(tools/fetch_cuda_headers.sh)
  fi
  cmake --preset cuda-sm90a -B build/cuda-check -DTE_INPLACE=OFF -DTE_PORTABILITY_CHECK=ON "${headers[@]}"
  cmake --build build/cuda-check --clean-first | tee "$report"
  "$py" tools/check_ptxas.py "$report"
  # The import fails if a kernel is declared but not defined. It also tests that importing needs no driver.
  PYTHONPATH=build/cuda-check/csrc "$py" -P -c 'import torch, _C; print("imported", _C.__file__)'
}

step_build() { tools/bootstrap.sh; }

# Runs each soak test that starts quickly for some seconds, with the installed package.
step_soak() {
  tools/bootstrap.sh
  PYTHONSAFEPATH='' "$py" tools/soak
}

# Runs pytest with the installed package: -P keeps the source tree off Python's path, also in the processes that tests start.
# Uses one process for each processor, because there are many small tests.
step_python_tests() {
  tools/bootstrap.sh
  local parallel=()
  ! "$py" -P -c 'import xdist' 2>/dev/null || parallel=(-n "$(nproc)" --maxprocesses 8 --dist worksteal)
  PYTHONSAFEPATH=1 "$py" -P -m pytest "${parallel[@]}"
}

run_step() { # runs one step in a separate shell, so that `set -e` works inside the step
  local name=$1 log=$LOGS/$1.log status=0 begin=$SECONDS
  printf '\n=== %s\n' "$name"
  # In a function that is called on the left of && or ||, `set -e` would be ignored.
  bash "$0" --inside "$name" 2>&1 | tee "$log" || status=$?
  case $status in
    0) verdict[$name]=passed ;;
    "$SKIPPED") verdict[$name]=$(grep '^SKIPPED: ' "$log" | tail -n 1) ;;
    *) verdict[$name]="FAILED ($status)" failed+=("$name") ;;
  esac
  seconds[$name]=$((SECONDS - begin))
}

case ${1:-} in
  --list)
    echo "${STEPS[*]}"
    exit
    ;;
  --inside)
    "step_$2"
    exit
    ;;
esac

mkdir -p "$LOGS"
declare -A verdict seconds
failed=()
[ $# -gt 0 ] || set -- "${STEPS[@]}"
for name; do
  run_step "$name"
done

printf '\n=== summary\n'
for name; do
  printf '%-14s %5d s  %s\n' "$name" "${seconds[$name]}" "${verdict[$name]}"
done
for name in cpp_tests python_tests; do
  if [ -n "${verdict[$name]:-}" ]; then
    grep -E '^[0-9]+% tests passed|^=+ .* in [0-9.]+s.* =+$' "$LOGS/$name.log" | tail -n 1 || true
  fi
done
[ ${#failed[@]} -eq 0 ]
