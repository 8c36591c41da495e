#!/usr/bin/env bash
# Runs the tests under several releases of torch and writes the table of docs/torch_releases.md.
#   tools/torch_matrix.sh                      the releases that the table has
#   tools/torch_matrix.sh 2.10.0 2.15.0        these; rows of others stay
#   TESTS="tests/pytorch/compiled" ...         a part of the tests; the table says so
#   ENVIRONMENTS=FOLDER                        where each release has its virtual environment (build/torch)
#   JOBS=1                                     processes that test at a time (one for each processor)
#   SECONDS_EACH=60                            longest time of a test (300: other releases may be slower)
# One environment has gigabytes where torch comes with CUDA; PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
# brings the small one.
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

# Torch, the tools in versions that go with it, and this package, which is built once for all.
prepare() {
  local release=$1 python=$2/bin/python
  [ -x "$python" ] || "$PYTHON" -m venv "$2"
  "$python" -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$release')" 2>/dev/null ||
    "$python" -m pip install -qq "torch==$release+cpu" 2>/dev/null || "$python" -m pip install -qq "torch==$release"
  # As pip knows it: torch.__version__ may name a CUDA that the wheel's own version does not.
  printf 'torch==%s\n' "$("$python" -c 'from importlib.metadata import version; print(version("torch"))')" >"$2/constraints.txt"
  "$python" -m pip install -qq -r tools/requirements.txt -c "$2/constraints.txt"
  [ -n "$(ls "$wheels"/*.whl 2>/dev/null)" ] || "$python" -m pip wheel -qq --no-build-isolation --no-deps -w "$wheels" .
  "$python" -m pip install -qq --no-deps --force-reinstall "$wheels"/*.whl
}

# The closing line of pytest as the cells of a row.
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
