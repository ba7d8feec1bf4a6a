"""plan → launch → serve with vLLM on CPU: its own parser takes every command line, and the server really speculates."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from k3dspark.checkpoint.published import published_config, tiny_config
from k3dspark.deploy.launch_files import write_launch_files
from k3dspark.deploy.options import DraftFacts, LaunchWish
from k3dspark.errors import BadInput
from k3dspark.monitoring.exposition import Exposition, parse
from k3dspark.monitoring.monitor import Monitor
from k3dspark.monitoring.scrape import Scraper
from vllm_environment import PYTHON, QUIET, inside_vllm, needs_vllm, write_pair

pytestmark = [pytest.mark.integration, needs_vllm]

PROGRAM = "from k3dspark.cli.main import main; main()"
CHOICES: dict[str, tuple[Any, ...]] = {
    "sampling": ("greedy", "probabilistic"),
    "rejection": ("standard", "block"),
    "adaptive": (False, True),
    "prefix_caching": (False, True),
    "eager": (False, True),
    "draft_tokens": (3, 7),
    "draft_tensor_parallel": (1, 8),
    "lengths": ((), ((1, 8, 3), (9, 16, 1))),
    "cache_dtype": ("auto", "fp8"),
    "nodes": (1, 2),
}
OPEN_CHANGES = ("adaptive_verification", "decode_context_parallel", "pipeline_parallel")


def wishes() -> Iterator[LaunchWish]:
    """Every pair of choices beside the defaults, on each device that vLLM knows, and vLLM-Ascend's own."""
    base = LaunchWish("vllm", "/models/draft", "/models/target", devices=8, device="cuda", build_has=OPEN_CHANGES)
    for first, second in itertools.combinations(CHOICES, 2):
        for values in itertools.product(CHOICES[first], CHOICES[second]):
            yield replace(base, **dict(zip((first, second), values, strict=True)))
    yield replace(base, decode_context_parallel=2)
    yield replace(base, pipeline_parallel=2)
    yield replace(base, quantization="compressed-tensors", trust_remote_code=True, served_name="a/b")
    yield replace(base, device="cpu", devices=1)
    for device, nodes in (("npu-a2", 1), ("npu-a3", 4)):
        yield LaunchWish("vllm-ascend", "/models/draft", "/models/target", device=device, nodes=nodes, devices=8)


def written_commands(folder: Path) -> list[list[str]]:
    """The words that each node's script hands to vLLM, for every wish that `plan` does not refuse."""
    draft, python = folder / "draft", folder / "python"
    draft.mkdir()
    (folder / "target").mkdir()  # vLLM takes the name of what is not there for that of a repository
    (draft / "config.json").write_text("{}")
    (draft / "model.safetensors").write_bytes(b"\x08" + b"\0" * 40)
    python.write_text('#!/bin/sh\n[ "$2" = k3dspark.vllm_plugin ] || printf "%s\\0" "$@"\n')
    python.chmod(0o755)
    # No node of a cluster is here: their addresses are not looked up.
    for name, line in (("getent", "echo 192.0.2.1 STREAM x"), ("ip", "echo 1: eth0 inet 192.0.2.1/24 x")):
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    commands = []
    for facts in (DraftFacts.of(published_config()), DraftFacts.of(tiny_config())):
        for wish in wishes():
            here = replace(wish, draft=str(draft), target=str(folder / "target"), python=str(python), context=512)
            try:
                plan = write_launch_files(facts, here, folder / "plan", force=(folder / "plan").exists())
            except BadInput:
                continue  # what the engine cannot do is refused before any file: tests/deploy
            for node in range(here.nodes):
                done = subprocess.run(
                    [plan.path / f"node-{node}.sh"], capture_output=True, check=True, timeout=60, env=environment
                )
                commands.append(done.stdout.decode().split("\0")[:-1])
    return commands


def after_program(words: list[str]) -> list[str]:
    """The options of the server: `serve MODEL` is `--model MODEL` to the parser of the plain server."""
    if words[1] == "vllm.entrypoints.cli.main":
        assert words[2] == "serve"
        return ["--model", *words[3:]]
    assert words[1] == "vllm.entrypoints.openai.api_server"
    return words[2:]


def test_vllms_own_parser_takes_every_command_line_that_plan_writes(tmp_path: Path) -> None:
    commands = [after_program(words) for words in written_commands(tmp_path)]
    spoilt = [[*commands[0], "--speculative-draft-model-path", "x"]]
    *answers, refusal = inside_vllm("parse", commands + spoilt)
    faults = [(answer["error"], words) for words, answer in zip(commands, answers, strict=True) if answer["error"]]
    assert faults == []
    assert len(commands) > 100
    assert {answer["speculative"]["method"] for answer in answers} == {"dspark"}
    assert refusal["error"] is not None, "a parser that says yes to everything would prove nothing"


@dataclass(frozen=True)
class Served:
    """A server that `launch` holds."""

    url: str
    plan: Path
    process: subprocess.Popen[str]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`plan` and `launch` as a person runs them, for a tiny pair."""
    folder = tmp_path_factory.mktemp("serving")
    target, draft = write_pair(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = [sys.executable, "-c", PROGRAM]
    options = {
        "--engine": "vllm", "--device": "cpu", "--target": target, "--python": PYTHON, "--port": port,
        "--context": 256, "--sequences": 4, "--out": folder / "plan",
    }  # fmt: skip
    words = [str(word) for pair in options.items() for word in pair]
    subprocess.run([*program, "plan", str(draft), *words], check=True, timeout=120, capture_output=True)
    process = subprocess.Popen(
        [*program, "launch", str(folder / "plan"), "--json", "--deadline", "600"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, **QUIET, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    told = []
    try:
        for line in process.stdout:
            told.append(line)
            if json.loads(line)["event"] == "healthy":
                break
        else:
            raise AssertionError("".join(told[-40:]))
        yield Served(f"http://127.0.0.1:{port}", folder / "plan", process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    assert process.returncode == 0


def fetch(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return str(answer.read().decode())


def complete(url: str, tokens: int, prompt: str = "1, 2, 3, 4, 5,") -> dict[str, Any]:
    body = {"model": "target", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer: dict[str, Any] = json.loads(fetch(f"{url}/v1/completions", body))
    return answer


def counter(exposition: Exposition, name: str) -> float:
    return sum(sample.value for sample in exposition.by_name[f"vllm:spec_decode_{name}_total"])


def test_the_generated_server_answers_and_speculates_by_its_own_metrics(served: Served) -> None:
    before = parse(fetch(f"{served.url}/metrics"))
    answer = complete(served.url, 12)
    after = parse(fetch(f"{served.url}/metrics"))
    assert answer["usage"]["completion_tokens"] == 12
    assert counter(after, "num_draft_tokens") > counter(before, "num_draft_tokens")
    assert counter(after, "num_draft_tokens") == 7 * counter(after, "num_drafts")
    done = subprocess.run([served.plan / "health.sh", "speculative"], capture_output=True, text=True, timeout=400)
    assert (done.returncode, done.stdout.strip()) == (0, "speculative"), done.stderr


def test_figures_of_the_monitor_equal_vllms_raw_counters_at_both_ends(served: Served) -> None:
    monitor = Monitor([f"{served.url}/metrics"], window_seconds=3600)
    with Scraper() as scraper:
        before = parse(fetch(f"{served.url}/metrics"))
        monitor.poll(scraper)
        complete(served.url, 12, "abcabcabc")
        (model,) = monitor.poll(scraper).models
        after = parse(fetch(f"{served.url}/metrics"))

    def added(name: str) -> float:
        return counter(after, name) - counter(before, name)

    rounds, accepted = added("num_drafts"), added("num_accepted_tokens")
    assert rounds > 0
    assert (model.whole.rounds, model.whole.accepted) == (rounds, accepted)
    assert model.whole.drafted == added("num_draft_tokens")
    assert model.whole.acceptance_length == 1 + accepted / rounds
    assert sum(model.whole.slots) == pytest.approx(accepted / rounds)
