#!/usr/bin/env bash
# Downloads the headers of cuBLASLt, cuDNN, cudnn-frontend and NVRTC, of the oldest versions with which the code must compile, into
# a cache outside of the clone. Prints the CMake options that name the include folders.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
WHEELS=(nvidia-cublas==13.0.2.14 nvidia-cudnn-cu13==9.14.0.64 nvidia-cudnn-frontend==1.32.0 nvidia-cuda-nvrtc==13.0.88)

cache=${XDG_CACHE_HOME:-$HOME/.cache}/te-cuda-headers/$(printf '%s\n' "${WHEELS[@]}" | cksum | cut -d' ' -f1)
if [ ! -e "$cache/complete" ]; then
  mkdir -p "$cache"
  download=$(mktemp -d)
  trap 'rm -rf "$download"' EXIT
  "$py" -m pip download -qq --no-deps -d "$download" "${WHEELS[@]}" >&2
  "$py" - "$cache" "$download"/*.whl <<'PY'
import sys
import zipfile

for wheel in sys.argv[2:]:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(sys.argv[1], [n for n in archive.namelist() if "/include/" in f"/{n}"])
PY
  touch "$cache/complete"
fi
printf -- '-DTE_%s_INCLUDE=%s\n' \
  CUBLAS "$cache/nvidia/cu13/include" CUDNN "$cache/nvidia/cudnn/include" CUDNN_FRONTEND "$cache/include" \
  NVRTC "$cache/nvidia/cu13/include"
