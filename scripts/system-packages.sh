#!/usr/bin/env bash
# What `make` needs from Debian or Ubuntu: a Python of 3.11 or newer with its venv module, and make itself; and what
# `k3dspark fetch git:…` and its tests need: git and git-lfs. g++ compiles the CPU kernels; without it PyTorch's serve.
set -euo pipefail

run=()
if [[ $EUID -ne 0 ]]; then
  command -v sudo >/dev/null || { echo "run this as root: installing packages needs it" >&2; exit 2; }
  run=(sudo)
fi
command -v apt-get >/dev/null || { echo "no apt-get here: install Python 3.11 or newer, its venv module, and make" >&2; exit 2; }

"${run[@]}" apt-get update
"${run[@]}" apt-get install --yes --no-install-recommends make python3 python3-venv git git-lfs g++

if python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  exit 0
fi
# An older release: its own python3 is too old, but a newer one may be packaged beside it.
for version in 3.13 3.12 3.11; do
  if apt-cache show "python$version-venv" >/dev/null 2>&1; then
    "${run[@]}" apt-get install --yes --no-install-recommends "python$version" "python$version-venv"
    exit 0
  fi
done
echo "this release packages no Python of 3.11 or newer; install one and run: make PYTHON=/path/to/python3.11" >&2
exit 2
