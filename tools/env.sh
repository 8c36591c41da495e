# Sourced by the other scripts. Sets which Python they use, and whether CUDA is built.
#   VENV    virtual environment, default .venv; empty means "use the system's Python as it is" and installs nothing
#   PYTHON  the Python that creates VENV, or that is used if VENV is empty; default python3
# shellcheck shell=bash
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT" || exit
VENV=${VENV-.venv}
PYTHON=${PYTHON:-python3}

has() { command -v "$1" >/dev/null; }

if [ -n "$VENV" ]; then
  case $VENV in /*) bin=$VENV/bin ;; *) bin=$ROOT/$VENV/bin ;; esac
  export PATH="$bin:$PATH"
  py=$bin/python
else
  py=$(command -v "$PYTHON")
  export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" # the package is built in place
fi
export py ROOT VENV PYTHON

# Without a GPU the CUDA backend cannot run, so it is not compiled (which takes minutes) unless TE_CUDA asks for it.
if ! has nvidia-smi; then
  export TE_CUDA=${TE_CUDA:-OFF}
fi
