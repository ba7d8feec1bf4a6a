"""What a request leaves behind in the server: nothing."""

from __future__ import annotations

import gc
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from harness import PATIENCE, Running, running

from k3dspark.decoding import FullBlock, Request
from k3dspark.embedded.pair import ModelPair
from k3dspark.model.cache import LatentCache
from k3dspark.serving.answer import Answer
from k3dspark.serving.generation import Generation
from k3dspark.serving.heap import trim_heap
from k3dspark.serving.server import EngineSettings
from k3dspark.serving.worker import Job
from k3dspark.target.attention import KeyValueCache

KINDS = (Request, Job, Generation, Answer, LatentCache, KeyValueCache)


def alive() -> Counter[str]:
    gc.collect()
    return Counter(type(thing).__name__ for thing in gc.get_objects() if type(thing) in KINDS)


def answer_some(server: Running, count: int) -> None:
    """Whole answers, streams, streams that are left, and bodies that are refused, four at a time."""

    def one(number: int) -> None:
        body = {"prompt": "Remember nothing of this.", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        if number % 4 == 0:
            server.complete(**body)
        elif number % 4 == 1:
            server.refused("/v1/completions", body | {"n": 0})
        else:
            with httpx.stream(
                "POST", server.url + "/v1/completions", json=body | {"stream": True}, timeout=PATIENCE
            ) as answer:
                for _ in answer.iter_lines():
                    if number % 4 == 2:
                        break

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(count)))
    while server.metric("num_requests_running") or server.metric("num_requests_waiting"):
        pass
    server.get("/health")


def test_requests_that_are_over_leave_no_object_behind(pair: ModelPair) -> None:
    engine = EngineSettings(FullBlock(), exact=True, prefix_rows=64)
    with running(pair, engine=engine) as server:
        answer_some(server, 8)
        before = alive()
        answer_some(server, 48)
        after = alive()
    grown = after - before
    assert grown.total() <= 4, f"the thread may still hold its last ones: {grown}"


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_pages_between_what_is_still_used_go_back_to_the_system() -> None:
    pieces = [bytes(3000) for _ in range(20_000)]
    kept = pieces[::50]
    full = resident()
    del pieces
    if not trim_heap():
        pytest.skip("no glibc")
    assert resident() < full - 30_000_000
    assert len(kept) == 400
