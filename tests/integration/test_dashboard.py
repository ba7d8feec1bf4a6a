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
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))

from harness import Running, running, tiny_pair

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium"),
]


def browse(url: str, *options: str, size: str = "1280,1000") -> str:
    """The page's document after some seconds of its clock."""
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={size}",
               "--virtual-time-budget=9000", *options, f"{url}/dashboard"]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout


def screenshot(url: str, folder: Path, name: str, size: str = "1280,1000") -> None:
    browse(url, f"--screenshot={folder / name}", size=size)
    assert (folder / name).stat().st_size > 10_000


def shown(page: str, element: str) -> str:
    """The text of an element."""
    found = re.search(rf'id="{element}"[^>]*>(.*?)</(?:div|span)>', page, re.DOTALL)
    assert found is not None, element
    return re.sub(r"<[^>]+>", "", found[1]).strip()


def test_the_page_shows_what_the_metrics_say(tmp_path: Path) -> None:
    folder = Path(os.environ.get("K3DSPARK_SCREENSHOTS", tmp_path))
    with running(tiny_pair(tmp_path)) as server:
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

        server.service.worker.stop()
        server.service.worker.join(600)
        stopped = browse(server.url, "--dump-dom")
        assert shown(stopped, "state") == "engine stopped"
        assert "The engine has stopped" in shown(stopped, "banner")
        screenshot(server.url, folder, "stopped.png")


def under_load(server: Running, folder: Path) -> None:
    """Screenshots while four clients keep asking, on a desk and on a phone."""
    enough = threading.Event()

    def ask() -> None:
        while not enough.is_set():
            server.complete("Tell me", max_tokens=60, ignore_eos=True, temperature=1)

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
