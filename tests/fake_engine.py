"""Plays a serving engine for tests of launching: HTTP, metrics, workers, and the ways in which engines fail.

`FAKE_ENGINE` says how it behaves: healthy, silent (never answers), stubborn (ignores SIGTERM), plain (no drafts), or
`die:TEXT` (prints TEXT and ends with status 1). It writes its process ids to the file `FAKE_ENGINE_PIDS`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ARGUMENTS = sys.argv[1:]
BEHAVIOUR = os.environ.get("FAKE_ENGINE", "healthy")


def after(flag: str, default: str) -> str:
    return ARGUMENTS[ARGUMENTS.index(flag) + 1] if flag in ARGUMENTS else default


class Handler(BaseHTTPRequestHandler):
    drafted = 0

    def do_GET(self) -> None:
        name = after("--served-model-name", "target")
        if self.path == "/metrics":
            self._answer(
                f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {Handler.drafted}\n'
                f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {Handler.drafted // 2}\n'
            )
        elif self.path == "/v1/models":
            self._answer(json.dumps({"data": [{"id": name}]}))
        else:
            self._answer("")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if BEHAVIOUR != "plain":
            Handler.drafted += 70
        self._answer(json.dumps({"choices": [{"text": "6"}]}))

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    # A worker that ignores SIGTERM, as one that hangs in a collective does: only its group's SIGKILL ends it.
    worker = subprocess.Popen([sys.executable, "-c", "import signal, time\n"
                               "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(flush=True)\ntime.sleep(600)"],
                              stdout=subprocess.PIPE)  # fmt: skip
    assert worker.stdout is not None
    worker.stdout.readline()  # from here on it ignores the signal
    if BEHAVIOUR == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(os.environ["FAKE_ENGINE_PIDS"], "a") as file:
        file.write(f"{os.getpid()}\n{worker.pid}\n")
    print("loading weights", flush=True)
    if BEHAVIOUR.startswith("die:"):
        print(BEHAVIOUR[4:], flush=True)
        sys.exit(1)
    if BEHAVIOUR != "stubborn":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if BEHAVIOUR == "silent" or "--headless" in ARGUMENTS:
        time.sleep(600)
    server = ThreadingHTTPServer((after("--host", "127.0.0.1"), int(after("--port", "0"))), Handler)
    print("ready", flush=True)
    server.serve_forever()


main()
