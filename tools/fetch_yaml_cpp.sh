#!/usr/bin/env bash
# Unpacks the Debian packages of yaml-cpp into build/yaml-cpp, where the build finds them on machines that cannot install packages:
# run this on a machine with a network, and copy the folder.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
target=$ROOT/build/yaml-cpp
download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT
mkdir -p "$target"
(
  cd "$download"
  runtime=$(apt-cache depends libyaml-cpp-dev | awk '/Depends: libyaml-cpp/ {print $2; exit}')
  apt-get download -q libyaml-cpp-dev "$runtime" >&2
  for package in *.deb; do
    dpkg -x "$package" "$target"
  done
)
echo "$target"
