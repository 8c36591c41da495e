#!/usr/bin/env bash
# Builds the documentation into build/docs; a warning is an error. Needs neither torch nor a build of the package.
#   tools/docs.sh          builds the site
#   tools/docs.sh serve    shows the site at http://127.0.0.1:8000, and builds it again when a page changes
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

if [ -n "$VENV" ]; then
  stamp=$VENV/.te-docs
  "$py" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m venv "$VENV"
  if ! cmp -s docs/requirements.txt "$stamp"; then
    printf 'docs: installing docs/requirements.txt\n'
    "$py" -m pip install -qq -r docs/requirements.txt
    cp docs/requirements.txt "$stamp"
  fi
fi
export NO_MKDOCS_2_WARNING=1 # the theme warns about mkdocs 2; docs/requirements.txt asks for mkdocs 1
if [ "${1:-build}" = serve ]; then
  exec "$py" -m mkdocs serve
fi
"$py" -m mkdocs build --strict --quiet
