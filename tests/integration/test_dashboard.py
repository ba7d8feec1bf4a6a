"""The dashboard in a real browser: idle, under load, with the engine stopped. Needs `chromium` on the path.

Screenshots go to the folder that K3DSPARK_SCREENSHOTS names, or to the test's own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))

from harness import Running, running, tiny_pair

from k3dspark.decoding import FullBlock
from k3dspark.serving.server import EngineSettings

PROMPT = "Tell me, in a few words that come to your mind, what you see from where you are. "  # over a cached block
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium"),
]


def browse(url: str, *options: str, size: str = "1280,1000", seconds: int = 9) -> str:
    """The page's document after some seconds of its clock; 0: as soon as it is laid out."""
    clock = [f"--virtual-time-budget={1000 * seconds}"] if seconds else []
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={size}",
               *clock, *options, f"{url}/dashboard"]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout


def screenshot(url: str, folder: Path, name: str, size: str = "1280,1000", seconds: int = 9) -> None:
    browse(url, f"--screenshot={folder / name}", size=size, seconds=seconds)
    assert (folder / name).stat().st_size > 10_000


def shown(page: str, element: str) -> str:
    """The text of an element."""
    found = re.search(rf'id="{element}"[^>]*>(.*?)</(?:div|span)>', page, re.DOTALL)
    assert found is not None, element
    return re.sub(r"<[^>]+>", "", found[1]).strip()


def test_the_page_shows_what_the_metrics_say(tmp_path: Path) -> None:
    folder = Path(os.environ.get("K3DSPARK_SCREENSHOTS", tmp_path))
    engine = EngineSettings(FullBlock(), exact=True, prefix_rows=4096)
    with running(tiny_pair(tmp_path), engine=engine) as server:
        idle = browse(server.url, "--dump-dom")
        assert shown(idle, "state") == "idle"
        assert "no rounds yet" in idle
        assert "no requests" in idle
        screenshot(server.url, folder, "idle.png")

        under_load(server, folder)

        done = browse(server.url, "--dump-dom")
        length = 1 + server.metric("spec_decode_num_accepted_tokens_total") / server.metric(
            "spec_decode_num_rounds_total"
        )
        tokens = int(server.metric("generation_tokens_total"))
        finished = int(server.metric("request_success_total"))
        assert shown(done, "acceptance-since") == f"{length:.2f} since start"
        assert shown(done, "speed-since") == f"{tokens:,} tokens since start"
        assert shown(done, "requests-since") == f"{finished:,} finished since start"
        assert shown(done, "model") == "target"
        assert shown(done, "requests") == "0 / 0"
        preemptions = int(server.metric("num_preemptions_total"))
        hits = server.metric("prefix_cache_hits_total") / server.metric("prefix_cache_queries_total")
        assert hits > 0
        assert shown(done, "cache-since") == f"0 tokens, {preemptions} preemptions, {percent(hits)} prefix hits"
        at = [{"position": str(slot)} for slot in range(7)]
        verified, accepted, predicted = (
            [server.metric(f"spec_decode_{name}_per_pos_total", **slot) for slot in at]
            for name in ("num_draft_tokens", "num_accepted_tokens", "predicted_survival")
        )
        pairs = zip(accepted, predicted, verified, strict=True)
        assert bars(done, "Accepted by slot") == [
            percent(n / v) for stood, foretold, v in pairs for n in (stood, foretold)
        ]

        server.service.worker.stop()
        server.service.worker.join(600)
        stopped = browse(server.url, "--dump-dom")
        assert shown(stopped, "state") == "engine stopped"
        assert "The engine has stopped" in shown(stopped, "banner")
        screenshot(server.url, folder, "stopped.png")


def percent(share: float) -> str:
    """As JavaScript rounds it."""
    return f"{Decimal(100 * share).quantize(Decimal(1), ROUND_HALF_UP)}%"


def bars(page: str, chart: str) -> list[str]:
    """The values that the bars of a chart name when pointed at."""
    found = re.search(rf'<svg[^>]*aria-label="{chart}"[^>]*>(.*?)</svg>', page, re.DOTALL)
    assert found is not None, chart
    return [text.split(": ")[1] for text in re.findall(r"<title>(.*?)</title>", found[1])]


def test_until_the_first_figures_come_the_page_is_loading(tmp_path: Path) -> None:
    """/metrics does not answer before the browser has gone."""
    folder = Path(os.environ.get("K3DSPARK_SCREENSHOTS", tmp_path))
    with running(tiny_pair(tmp_path)) as server:
        gone = threading.Event()
        text = server.service.metrics.text

        def late() -> bytes:
            gone.wait(600)
            return text()

        server.service.metrics.text = late  # type: ignore[method-assign]
        try:
            screenshot(server.url, folder, "loading.png", seconds=0)
            gone.set()
            time.sleep(1)  # the answer to the browser that has left
            gone.clear()
            page = browse(server.url, "--dump-dom", seconds=0)
        finally:
            gone.set()
        assert shown(page, "state") == "connecting"
        assert '<body class="loading">' in page
        assert shown(page, "banner") == ""


def under_load(server: Running, folder: Path) -> None:
    """Screenshots while four clients keep asking, on a desk and on a phone."""
    enough = threading.Event()

    def ask() -> None:
        while not enough.is_set():
            server.complete(PROMPT, max_tokens=60, ignore_eos=True, temperature=1)

    clients = [threading.Thread(target=ask) for _ in range(4)]
    for client in clients:
        client.start()
    try:
        page = browse(server.url, "--dump-dom")
        assert shown(page, "state") == "serving"
        assert re.fullmatch(r"\d+ / \d+", shown(page, "requests"))
        screenshot(server.url, folder, "load.png")
        screenshot(server.url, folder, "phone.png", size="400,2400")
    finally:
        enough.set()
        for client in clients:
            client.join()
