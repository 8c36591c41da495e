#!/usr/bin/env bash
# Builds for the GPU of this machine, with the system's Python and without network, then runs one of these:
#   tools/gpu_run.sh test [pytest arguments]   C++ tests, then pytest with the GPU tests
#   tools/gpu_run.sh sanitize [tools]          tests marked `sanitize` under compute-sanitizer: memcheck, racecheck, initcheck, synccheck
#   tools/gpu_run.sh bench [names]             benchmarks, results in benchmarks/results
#   tools/gpu_run.sh -- command...             any command, with PYTHONPATH set to this tree
# TE_CUDA_ARCHS=80-virtual builds only portable code (PTX), which the driver compiles when a kernel is first needed.
# TE_CUDNN_FRONTEND_INCLUDE=<folder> names the headers of cudnn-frontend if its wheel is not installed.
# If $OUT is set, logs are written there, and results that the run has written are copied there.
set -euo pipefail
export VENV='' PYTHON=${PYTHON:-python3} TE_CUDA=ON
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
export PATH="$PATH:/usr/local/cuda/bin"
BUILD=build/gpu
LOGS=${OUT:-$BUILD/logs}
mkdir -p "$BUILD" "$LOGS"
started=$(mktemp)

build() {
  cmake -S . -B $BUILD -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$py" \
    -DTE_CUDA=ON -DTE_LINE_INFO=ON -DTE_TESTS=ON -DTE_INPLACE=ON -DTE_PTXAS_REPORT=ON "-DTE_CUDA_ARCHS=${TE_CUDA_ARCHS:-90a-real}" \
    ${TE_CUDNN_FRONTEND_INCLUDE:+-DTE_CUDNN_FRONTEND_INCLUDE="$TE_CUDNN_FRONTEND_INCLUDE"}
  cmake --build $BUILD
}

run_tests() {
  ctest --test-dir $BUILD --output-on-failure --no-tests=error 2>&1 | tee "$LOGS/ctest.log"
  "$py" -m pytest "$@" 2>&1 | tee "$LOGS/pytest.log"
}

# Torch's caching allocator is switched off, so that every tensor is a separate allocation and no access out of bounds is hidden in a
# cached block. cuDNN's attention kernels are left out, because the tools report errors in them: races, divergent barriers, reads of
# uninitialised memory. initcheck then does not see what these kernels write, nor what cuBLASLt writes by asynchronous copies, and
# would report reads of it as errors. So initcheck runs without the tests of cuDNN and of GEMMs.
run_sanitizer() {
  local tool files
  mapfile -t files < <(grep -rl --include='test_*.py' mark.sanitize tests)
  [ $# -gt 0 ] || set -- memcheck racecheck initcheck synccheck
  for tool; do
    printf '=== %s\n' "$tool"
    local own=("${files[@]}")
    if [ "$tool" = initcheck ]; then
      mapfile -t own < <(printf '%s\n' "${files[@]}" | grep -v -e cudnn -e gemm)
    fi
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --kernel-name-exclude kernel_substring=cudnn --error-exitcode 1 \
      "$py" -m pytest -m sanitize -o timeout=500 "${own[@]}" 2>&1 | tee "$LOGS/$tool.log"
  done
}

run_benchmarks() { tools/bench.sh "$@" 2>&1 | tee "$LOGS/bench.log"; }

finish() {
  if [ -n "${OUT:-}" ]; then
    find benchmarks/results tools/soak/results -name '*.json' -newer "$started" -exec cp -t "$OUT" {} + 2>/dev/null || true
  fi
  rm -f "$started"
}
trap finish EXIT

build >"$LOGS/build.log" 2>&1 || { tail -n 100 "$LOGS/build.log"; exit 1; }
"$py" tools/check_ptxas.py "$LOGS/build.log" || true # only prints: `make cuda_build` checks this, and files that are not compiled again have no report here

verb=${1:-test}
shift || true
case $verb in
  test) run_tests "$@" ;;
  sanitize) run_sanitizer "$@" ;;
  bench) run_benchmarks "$@" ;;
  --) "$@" ;;
  *)
    sed -n '2,10s/^# //p' "${BASH_SOURCE[0]}"
    exit 2
    ;;
esac
