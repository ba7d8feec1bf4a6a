"""Wear a server out: many streams at once, clients that leave, bodies that are too large or no JSON at all.

    python scripts/soak.py --minutes 10 --streams 64

Starts `k3dspark serve --exact` over a tiny random pair, with cache rows so few that requests must step back. At the
end, and with exit status 1 otherwise:

- every finished answer was the answer of the same request alone;
- the server's counters add up to its responses, and no answer was a 500;
- nothing is left running, no cache row is held, and memory is flat to 2 % after the first quarter;
- SIGTERM ends the server with exit status 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests")]

PROMPTS = [f"Tell me about {thing}." for thing in ("tides", "owls", "maps", "salt", "bees", "rust", "fog", "ink")]
TOKENS = 48
FLAT = 0.02
PROGRAM = [sys.executable, "-c", "from k3dspark.cli.main import main; main()"]


@dataclass
class Soak:
    """One run: where the server is, what it must answer, and what has happened so far."""

    url: str
    draw: random.Random
    expected: dict[str, str] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)

    async def run(self, minutes: float, streams: int) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=streams)
        async with httpx.AsyncClient(timeout=300, limits=limits) as client:
            for prompt in PROMPTS:
                self.expected[prompt] = (await client.post(self.url + "/v1/completions", json=body(prompt))).json()[
                    "choices"
                ][0]["text"]
            started, end = time.monotonic(), time.monotonic() + 60 * minutes
            watching = asyncio.create_task(self._watch(client, started))
            await asyncio.gather(*(self._client(client, end) for _ in range(streams)))
            watching.cancel()

    async def _client(self, client: httpx.AsyncClient, end: float) -> None:
        acts = (self._whole, self._stream, self._stream, self._leave, self._leave_at_once, self._oversized,
                self._malformed)  # fmt: skip
        while time.monotonic() < end:
            act = self.draw.choice(acts)
            try:
                await act(client)
                self.seen[act.__name__] += 1
            except httpx.HTTPError as error:
                self.wrong.append(f"{act.__name__}: {type(error).__name__} {error}")

    async def _whole(self, client: httpx.AsyncClient) -> None:
        prompt = self.draw.choice(PROMPTS)
        answer = await client.post(self.url + "/v1/completions", json=body(prompt))
        if self._counted(answer.status_code):
            self._compare(prompt, answer.json()["choices"][0]["text"])

    async def _stream(self, client: httpx.AsyncClient) -> None:
        prompt, text = self.draw.choice(PROMPTS), ""
        async with client.stream("POST", self.url + "/v1/completions", json=body(prompt, stream=True)) as answer:
            if not self._counted(answer.status_code):
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        self._compare(prompt, text)

    async def _leave(self, client: httpx.AsyncClient) -> None:
        """Read a little, then hang up."""
        asked = body(self.draw.choice(PROMPTS), stream=True)
        async with client.stream("POST", self.url + "/v1/completions", json=asked) as answer:
            lines = answer.aiter_lines()
            for _ in range(self.draw.randrange(1, 8)):
                if await anext(lines, None) is None:
                    break

    async def _leave_at_once(self, client: httpx.AsyncClient) -> None:
        try:
            asked = body(self.draw.choice(PROMPTS))
            await asyncio.wait_for(client.post(self.url + "/v1/completions", json=asked), self.draw.random() * 0.2)
        except TimeoutError:
            pass

    async def _oversized(self, client: httpx.AsyncClient) -> None:
        answer = await client.post(self.url + "/v1/completions", json={"prompt": "x" * 70_000})
        self._want(answer, 413)

    async def _malformed(self, client: httpx.AsyncClient) -> None:
        content = self.draw.choice([b"{", b"\xff\xfe", b"[]", b'{"prompt": 5}', b"[" * 20_000])
        self._want(await client.post(self.url + "/v1/completions", content=content), 400)

    def _counted(self, status: int) -> bool:
        """Whether there is an answer to compare; a full queue is an honest refusal."""
        self.seen[f"status {status}"] += 1
        if status not in (200, 429):
            self.wrong.append(f"status {status} to a good request")
        return status == 200

    def _want(self, answer: httpx.Response, status: int) -> None:
        if answer.status_code != status:
            self.wrong.append(f"status {answer.status_code} where {status} was due")

    def _compare(self, prompt: str, text: str) -> None:
        self.seen["finished"] += 1
        if text != self.expected[prompt]:
            self.wrong.append(f"{prompt!r} was answered {text!r}, alone {self.expected[prompt]!r}")

    async def _watch(self, client: httpx.AsyncClient, started: float) -> None:
        while True:
            samples = metrics((await client.get(self.url + "/metrics")).text)
            self.memory.append((time.monotonic() - started, samples["process_resident_memory_bytes"]))
            await asyncio.sleep(1)


def body(prompt: str, stream: bool = False) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}


def metrics(text: str) -> Counter[str]:
    """Values by name, and by name and the label that splits it."""
    values: Counter[str] = Counter()
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            names = {name.split("{")[0], name.replace('engine="0",', "").replace(',model_name="soak"', "")}
            for key in names:  # one, where there are no labels
                values[key] += float(value)
    return values


def check(soak: Soak, minutes: float) -> list[str]:
    """What did not hold."""
    deadline = time.monotonic() + 60
    while True:
        now = metrics(httpx.get(soak.url + "/metrics", timeout=60).text)
        left = [
            name
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_rows")
            if now[f"k3dspark:{name}"]
        ]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    wrong = soak.wrong + [f"{name} is not 0 at the end" for name in left]
    response = 'k3dspark:http_responses_total{endpoint="/v1/completions",status="%s"}'
    answered = sum(now[response % status] for status in (200, 499, 504))
    if answered != now["k3dspark:request_success_total"]:
        wrong.append(f"{answered:.0f} responses, {now['k3dspark:request_success_total']:.0f} requests ended")
    if now[response % 500]:
        wrong.append(f"{now[response % 500]:.0f} responses were 500")
    if now["k3dspark:generation_tokens_total"] < TOKENS * soak.seen["finished"]:
        wrong.append("fewer tokens were generated than arrived")
    settled = [rss for at, rss in soak.memory if at > 15 * minutes]
    if len(settled) > 8:
        quarter = len(settled) // 4
        before, after = sum(settled[:quarter]) / quarter, sum(settled[-quarter:]) / quarter
        print(f"memory {before / 1e6:.1f} MB, then {after / 1e6:.1f} MB; "
              f"{now['k3dspark:num_preemptions_total']:.0f} preemptions")  # fmt: skip
        print(
            "memory over time, MB:",
            " ".join(f"{rss / 1e6:.0f}" for _, rss in soak.memory[:: max(len(soak.memory) // 20, 1)]),
        )
        if after > before * (1 + FLAT):
            wrong.append(f"memory grew from {before / 1e6:.1f} to {after / 1e6:.1f} MB")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    from tiny_models import write_draft, write_target

    with tempfile.TemporaryDirectory() as directory:
        target, draft = write_target(Path(directory) / "target"), write_draft(Path(directory) / "draft")
        command = [*PROGRAM, "serve", "--port", "0", "--target", str(target), "--draft", str(draft), "--exact",
                   "--dtype", "float32", "--model-name", "soak", "--max-running", "16", "--max-queue", "40",
                   "--cache-rows", "600", "--max-body-bytes", "65536"]  # fmt: skip
        log = (Path(directory) / "log").open("w+")
        server = subprocess.Popen(command, stderr=log)
        try:
            soak = Soak(wait_for(server, Path(directory) / "log"), random.Random(options.seed))
            asyncio.run(soak.run(options.minutes, options.streams))
            wrong = check(soak, options.minutes)
            server.send_signal(signal.SIGTERM)
            status = server.wait(120)
            if status:
                wrong.append(f"exit status {status} after SIGTERM")
        finally:
            server.kill()
            server.wait()
            log.close()
    print(", ".join(f"{count} {name.lstrip('_')}" for name, count in sorted(soak.seen.items())))
    for line in wrong[:20]:
        print("wrong:", line)
    print(f"{len(wrong)} things were wrong" if wrong else "all held")
    return bool(wrong)


def wait_for(server: subprocess.Popen[bytes], log: Path) -> str:
    """The server's address, once it is ready."""
    while server.poll() is None:
        text = log.read_text()
        if "dashboard at" in text:
            url = "http://" + text.split("http://")[1].split(",")[0]
            try:
                if httpx.get(url + "/ready", timeout=60).status_code == 200:
                    return url
            except httpx.HTTPError:
                pass
        time.sleep(0.2)
    raise SystemExit(f"the server did not start:\n{log.read_text()}")


if __name__ == "__main__":
    sys.exit(main())
