#!/usr/bin/env bash
# Runs a soak test with the native modules under AddressSanitizer and UndefinedBehaviorSanitizer:
#   tools/soak/asan.sh ops --seconds 600
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
build=$ROOT/build/soak-asan
cmake -S "$ROOT" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Debug "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -g" -DTE_CUDA=OFF \
  -DTE_SANITIZE=address,undefined "-DPython_EXECUTABLE=$py" > /dev/null
cmake --build "$build" > /dev/null
tree=$build/tree
rm -rf "$tree"
mkdir -p "$tree"
cp -rs "$ROOT/transformer_engine" "$ROOT/nvdlfw_inspect" "$tree"
rm -f "$tree"/*/*.so
cp "$build"/csrc/_C.*.so "$tree/transformer_engine"
cp "$build"/csrc/_engine.*.so "$tree/nvdlfw_inspect"
# Leak detection is off, because Python itself does not free all memory at exit.
export ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:allocator_may_return_null=1 PYTHONPATH=$tree TE_SOAK_UNDER="ASan and UBSan"
LD_PRELOAD="$(c++ -print-file-name=libasan.so) $(c++ -print-file-name=libstdc++.so)" exec "$py" "$ROOT/tools/soak" "$@"
