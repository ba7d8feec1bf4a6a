"""With and without the draft, long prompts included: identical tokens over HTTP. Takes long; the times are below.

The embedded pair goes to its context of 8,192 tokens. Pairs of random weights go to 32K and 128K: a miniature with the
published tensor names (`synth --tiny`) to 32K, and one of a single small layer to 128K, where the miniature would take
hours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from k3dspark.checkpoint.synth import synthesise
from tiny_models import write_draft, write_target

pytestmark = [pytest.mark.integration, pytest.mark.long]

PROGRAM = [sys.executable, "-c", "from k3dspark.cli.main import main; main()"]
PATIENCE = 1800  # seconds until a server is up
FULL = "K3DSPARK_ACCEPT_FULL" in os.environ  # five prompts a length instead of one or two


@contextmanager
def server(*options: str) -> Iterator[str]:
    """`k3dspark serve` as a process of its own; its address."""
    command = [*PROGRAM, "serve", "--port", "0", "--max-seconds", "86400", "--prefix-cache-rows", "262144", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    address: Queue[str] = Queue()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            if "dashboard at" in line:
                address.put("http://" + line.split("http://")[1].split(",")[0])

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield address.get(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
        reader.join()


def compared(plain: list[str], drafting: list[str], *options: str) -> dict[str, Any]:
    """The report of `k3dspark accept` between the two servers."""
    with ExitStack() as stack:
        one, other = (stack.enter_context(server(*side)) for side in (plain, drafting))
        command = [
            *PROGRAM,
            "accept",
            "--baseline",
            one,
            "--candidate",
            other,
            "--json",
            "--timeout",
            "86400",
            *options,
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    told: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == 0, told["verdict"]
    return told


def check(told: dict[str, Any], group: str, prompts: int) -> None:
    """Every answer of a length is identical, in each run, and bit by bit so."""
    runs = [tally for tally in told["tallies"] if tally["group"] == group]
    assert [tally["run"] for tally in runs] == ["cold", "warm"]
    assert told["baseline"]["cached_prompt_tokens"] > 0
    assert told["candidate"]["cached_prompt_tokens"] > 0
    assert all(tally["answers"] == tally["identical"] == prompts for tally in runs)
    assert told["verdict"]["outcome"] == "identical"
    assert told["numerics"]["candidate"]["largest"] == 0.0


def test_the_embedded_pair_up_to_its_context() -> None:
    """Quiet core: about 4 minutes; `K3DSPARK_ACCEPT_FULL` about 20."""
    prompts = 5 if FULL else 1
    told = compared(["--no-draft"], [], "--lengths", "1K,32K", "--per-length", str(prompts), "-n", "32")
    assert told["settings"]["lengths"] == [1024, 8192 - 32]
    check(told, "1K", prompts)
    check(told, str(8192 - 32), prompts)


def test_a_miniature_of_the_published_layout_at_32k(tmp_path: Path) -> None:
    """Quiet core: some ten minutes a prompt and side, as an exact target attends by small tiles."""
    synthesise(tmp_path / "pair", tiny=True)
    _lengthen(tmp_path / "pair", 65536)
    _compare_at("32K", tmp_path / "pair", 5 if FULL else 1)


def test_one_small_layer_at_128k(tmp_path: Path) -> None:
    """Quiet core: some minutes a prompt and side."""
    target = write_target(tmp_path / "pair/target")  # for its tokenizer
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(
        target, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8,
        max_position_embeddings=262144,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(target)
    write_draft(
        tmp_path / "pair/draft", max_position_embeddings=262144, target_num_hidden_layers=1, num_target_layers=1,
        target_layer_ids=[0], num_hidden_layers=1,
    )  # fmt: skip
    _compare_at("128K", tmp_path / "pair", 5 if FULL else 1)


def _compare_at(length: str, pair: Path, prompts: int) -> None:
    target, draft = ["--target", str(pair / "target")], ["--draft", str(pair / "draft")]
    limits = ["--dtype", "float32", "--max-body-bytes", str(64 << 20)]
    told = compared(
        [*target, "--no-draft", *limits], [*target, *draft, *limits],
        "--lengths", length, "--per-length", str(prompts), "-n", "16",
    )  # fmt: skip
    assert told["settings"]["lengths"] == [int(length.removesuffix("K")) * 1024]
    check(told, length, prompts)


def _lengthen(pair: Path, positions: int) -> None:
    """A longer context for a pair of random weights."""
    for file in (pair / "draft/config.json", pair / "target/config.json"):
        config = json.loads(file.read_text())
        config["max_position_embeddings"] = positions
        if "rope_parameters" in config:
            rope = config["rope_parameters"]
            rope["factor"] = positions / rope["original_max_position_embeddings"]
        file.write_text(json.dumps(config))
