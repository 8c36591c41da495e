#!/usr/bin/env bash
# Prepares a fresh Debian or Ubuntu: installs system packages, makes .venv with torch and the tools, and builds this package into it.
# Does only what is missing, so that a second run takes about a second. With VENV= it installs nothing and builds in place.
#   tools/bootstrap.sh         does all of this
#   tools/bootstrap.sh tools   does not build this package, for checks that do not need it
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
TORCH_VERSION=2.13.0

say() { printf 'bootstrap: %s\n' "$*"; }

install_system_packages() {
  local missing=()
  has g++ || missing+=(g++)
  has cmake || missing+=(cmake)
  has ninja || missing+=(ninja-build)
  has ccache || missing+=(ccache)
  has make || missing+=(make)
  has git || missing+=(git)
  [ -e /usr/include/gtest/gtest.h ] || missing+=(libgtest-dev)
  [ -e /usr/include/yaml-cpp/yaml.h ] || missing+=(libyaml-cpp-dev)
  has "$PYTHON" || missing+=(python3)
  if ! "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null; then
    missing+=(python3-venv)
  fi
  if ! "$PYTHON" -c 'import pathlib, sysconfig as s; exit(not pathlib.Path(s.get_path("include"), "Python.h").exists())' \
    2>/dev/null; then
    missing+=(python3-dev)
  fi
  [ ${#missing[@]} -eq 0 ] && return
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    as_root=(sudo)
  fi
  if ! has apt-get || { [ "$(id -u)" -ne 0 ] && ! has sudo; }; then
    say "these Debian packages are missing and cannot be installed from here: ${missing[*]}" >&2
    exit 1
  fi
  say "installing ${missing[*]}"
  "${as_root[@]}" apt-get update -q
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
}

# Installs torch with CUDA if the machine has a GPU, otherwise torch for CPUs. The wheel on PyPI needs gigabytes of CUDA libraries; torch's
# own index has a wheel for CPUs.
install_torch() {
  "$py" -c 'import torch' 2>/dev/null && return
  say "installing torch $TORCH_VERSION"
  if has nvidia-smi; then
    "$py" -m pip install -qq "torch==$TORCH_VERSION"
  else
    "$py" -m pip install -qq "torch==$TORCH_VERSION+cpu" 2>/dev/null ||
      "$py" -m pip install -qq --retries 1 --timeout 10 "torch==$TORCH_VERSION+cpu" \
        --extra-index-url https://download.pytorch.org/whl/cpu 2>/dev/null ||
      "$py" -m pip install -qq "torch==$TORCH_VERSION"
  fi
}

create_venv() {
  local stamp=$VENV/.te-tools
  if ! "$py" -m pip --version >/dev/null 2>&1; then
    say "creating $VENV"
    "$PYTHON" -m venv "$VENV"
  fi
  if ! cmp -s tools/requirements.txt "$stamp"; then
    install_torch
    say "installing tools/requirements.txt"
    "$py" -m pip install -qq -r tools/requirements.txt
    cp tools/requirements.txt "$stamp"
  fi
}

install_package() {
  local stamp=$VENV/.te-package
  local sources=(csrc cmake packaging/backend transformer_engine transformer_engine_torch nvdlfw_inspect CMakeLists.txt pyproject.toml)
  local headers=()
  if [ -e "$stamp" ] && [ -z "$(find "${sources[@]}" -name __pycache__ -prune -o -newer "$stamp" -print -quit)" ]; then
    return
  fi
  say "building transformer-engine into $VENV (TE_CUDA=${TE_CUDA:-AUTO})"
  if [ "${TE_CUDA:-AUTO}" != OFF ]; then # the wheels that a build with isolation would install, without their dependencies
    mapfile -t headers < <("$py" packaging/backend/cuda_toolkit.py --wheels | grep .)
    [ ${#headers[@]} -eq 0 ] || "$py" -m pip install -qq --no-deps "${headers[@]}"
  fi
  touch "$stamp.new" # before the build, so that a file saved during it counts as newer
  "$py" -m pip install -qq --no-build-isolation --no-deps --force-reinstall .
  mv "$stamp.new" "$stamp"
}

# For an offline machine whose Python has torch and the tools: builds in place and installs nothing.
build_in_place() {
  "$py" -c 'import pybind11, torch' || { say "VENV= needs torch and pybind11 in $py" >&2; exit 1; }
  say "building in place for $py"
  mkdir -p build
  cmake -S . -B build/system -G Ninja -DPython_EXECUTABLE="$py" -DTE_INPLACE=ON -DTE_CUDA="${TE_CUDA:-AUTO}" >build/system.log 2>&1 ||
    { cat build/system.log; exit 1; }
  cmake --build build/system
}

if [ -n "$VENV" ]; then
  install_system_packages
  create_venv
fi
if [ "${1:-}" != tools ]; then
  if [ -n "$VENV" ]; then
    install_package
  else
    build_in_place
  fi
fi
