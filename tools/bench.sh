#!/usr/bin/env bash
# Runs benchmarks/bench_NAME.py for each NAME that is given, or all benchmarks. If one fails, the others still run, and the end of the
# output lists the failed ones.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
shopt -s nullglob

scripts=(benchmarks/bench_*.py)
if [ $# -gt 0 ]; then
  scripts=("${@/#/benchmarks/bench_}")
  scripts=("${scripts[@]/%/.py}")
fi
failed=()
for script in "${scripts[@]}"; do
  printf '=== %s\n' "$script"
  "$py" "$script" || failed+=("$script")
done
printf '%d benchmarks, %d failed\n' "${#scripts[@]}" "${#failed[@]}"
[ ${#failed[@]} -eq 0 ] || { printf '%s\n' "${failed[@]}"; exit 1; }
