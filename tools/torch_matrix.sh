#!/usr/bin/env bash
# Runs the tests under several releases of torch and writes the table of docs/torch_releases.md.
#   tools/torch_matrix.sh                      tests the releases that are in the table
#   tools/torch_matrix.sh 2.10.0 2.15.0        tests these releases; rows of other releases stay
#   TESTS="tests/pytorch/compiled" ...         runs only these tests; the table says so
#   ENVIRONMENTS=FOLDER                        folder for the virtual environments of the releases (default build/torch)
#   JOBS=1                                     number of test processes (default: one for each processor)
#   SECONDS_EACH=60                            time limit of a test (default 300, because other releases may be slower)
# With torch from PyPI, which contains CUDA, an environment takes gigabytes. With
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu pip finds the smaller torch for CPUs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
PAGE=$ROOT/docs/torch_releases.md
ENVIRONMENTS=${ENVIRONMENTS:-$ROOT/build/torch}
TESTS=${TESTS:-tests}
JOBS=${JOBS:-$(nproc)}
SECONDS_EACH=${SECONDS_EACH:-300}
for release; do
  [[ $release =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || { sed -n '2,/^[^#]/{/^#/p}' "$0" >&2 && exit 2; }
done
wheels=$ENVIRONMENTS/wheel
mkdir -p "$wheels"

say() { printf 'torch_matrix: %s\n' "$*"; }

# Installs torch, the tools in versions that work with this torch, and this package, which is built once for all releases.
prepare() {
  local release=$1 python=$2/bin/python
  [ -x "$python" ] || "$PYTHON" -m venv "$2"
  "$python" -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$release')" 2>/dev/null ||
    "$python" -m pip install -qq "torch==$release+cpu" 2>/dev/null || "$python" -m pip install -qq "torch==$release"
  # The constraint needs the version in the wheel's metadata: torch.__version__ may have a suffix for CUDA that pip does not know.
  printf 'torch==%s\n' "$("$python" -c 'from importlib.metadata import version; print(version("torch"))')" >"$2/constraints.txt"
  "$python" -m pip install -qq -r tools/requirements.txt -c "$2/constraints.txt"
  [ -n "$(ls "$wheels"/*.whl 2>/dev/null)" ] || "$python" -m pip wheel -qq --no-build-isolation --no-deps -w "$wheels" .
  "$python" -m pip install -qq --no-deps --force-reinstall "$wheels"/*.whl
}

# Prints a row of the table from the last line of pytest's output.
row() {
  local release=$1 log=$2 closing count cells=""
  closing=$(grep -E '^=* ?[0-9]+ (passed|failed|skipped).* in ' "$log" | tail -n 1)
  for count in passed failed skipped; do
    cells+=" $(grep -oE "[0-9]+ $count" <<<"$closing" | grep -oE '[0-9]+' || echo 0) |"
  done
  echo "| $release |$cells $TESTS | $(date +%F) |"
}

[ $# -gt 0 ] || mapfile -t releases < <(grep -oE '^\| [0-9]+\.[0-9]+\.[0-9]+ \|' "$PAGE" | tr -d '| ')
[ $# -eq 0 ] || releases=("$@")
rm -f "$wheels"/*.whl
for release in "${releases[@]}"; do
  say "$release"
  environment=$ENVIRONMENTS/$release
  log=$ENVIRONMENTS/$release.log
  prepare "$release" "$environment"
  # shellcheck disable=SC2086 # TESTS are several words
  PYTHONSAFEPATH=1 "$environment/bin/python" -P -m pytest -q -n "$JOBS" --timeout "$SECONDS_EACH" $TESTS 2>&1 | tee "$log" || true
  line=$(row "$release" "$log")
  say "$line"
  sed -i "/^| $release |/d" "$PAGE"
  printf '%s\n' "$line" >>"$PAGE"
done
