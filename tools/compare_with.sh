#!/usr/bin/env bash
# Compares the results of this tree with those of a commit, bit for bit, in the cases of tools/comparison; both stay in build/compare.
#   tools/compare_with.sh REF [arguments of `compare_versions.py record`]
# This tree must be built in place. REF is built for the CPU in a temporary folder. Or TE_OLD_TREE names a tree that is built already:
# this is needed for --device cuda, for which both trees need the CUDA backend (tools/gpu_run.sh builds it in place).
# With TE_COMPARE_AGAIN=1 REF runs twice, and results that differ between its two runs are not compared (some do, on a GPU).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
OUT=build/compare

say() { printf 'compare: %s\n' "$*"; }

build() { # for the CPU, in place
  cd "$1"
  cmake --preset cpu-release -DPython_EXECUTABLE="$py"
  cmake --build --preset cpu-release
}

record() { # with the package of a tree
  local tree=$1 out=$2
  shift 2
  PYTHONPATH=$tree "$py" tools/compare_versions.py record "$out" "$@"
}

if [ $# -eq 0 ]; then
  sed -n '2,6s/^# //p' "${BASH_SOURCE[0]}"
  exit 2
fi
ref=$1
shift
compgen -G 'transformer_engine/_C*.so' >/dev/null || {
  say "this tree is not built in place: cmake --preset cpu-release && cmake --build --preset cpu-release" >&2
  exit 2
}
mkdir -p "$OUT"
if [ -n "${TE_OLD_TREE:-}" ]; then
  old=$(cd "$TE_OLD_TREE" && pwd)
else
  scratch=$(mktemp -d)
  trap 'git worktree remove --force "$scratch/tree"; rm -rf "$scratch"' EXIT
  old=$scratch/tree
  git worktree add --quiet --detach "$old" "$ref"
  say "building $ref"
  (build "$old") >"$OUT/build.log" 2>&1 || { tail -n 50 "$OUT/build.log" >&2; exit 2; }
fi
record "$old" "$OUT/old.json" "$@"
again=()
if [ "${TE_COMPARE_AGAIN:-0}" = 1 ]; then
  record "$old" "$OUT/again.json" "$@"
  again=(--again "$OUT/again.json")
fi
record "$ROOT" "$OUT/new.json" "$@"
"$py" tools/compare_versions.py diff "$OUT/old.json" "$OUT/new.json" "${again[@]}"
