"""A model hub on the loopback interface: Git LFS, Hugging Face and ModelScope, as far as their clients ask.

Faults are switches: `stall_at` stops a body after so many bytes, `absent` and `damaged` name files that are not there
or not as stated. `requests` records what was asked.
"""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
LARGE = 1024  # files above this are LFS files


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Hub:
    """`files` of the one model it has, `model`. Use as a context manager."""

    files: dict[str, bytes]
    model: str = "org/name"
    stall_at: int | None = None
    absent: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)
    short: set[str] = field(default_factory=set)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    def __enter__(self) -> Hub:
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()

    def ranges(self) -> list[str]:
        """Range headers of the downloads asked for."""
        return [asked for method, _, asked in self.requests if method == "GET" and asked is not None]

    def content(self, path: str) -> bytes:
        data = self.files[path]
        if path in self.damaged:
            return data[:-1] + bytes([data[-1] ^ 1])
        return data[:-3] if path in self.short else data

    def wait_for_release(self) -> None:
        self._released.wait(60)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        self.hub.requests.append(("POST", self.path, None))
        if self.path.endswith("/objects/batch"):
            objects = [self._lfs_object(item) for item in body["objects"]]
            self._json({"transfer": "basic", "objects": objects}, "application/vnd.git-lfs+json")
        else:
            self._missing()

    def _lfs_object(self, item: dict[str, Any]) -> dict[str, Any]:
        known = {sha256(data): name for name, data in self.hub.files.items()}
        name = known.get(item["oid"])
        if name is None or name in self.hub.absent:
            return {**item, "error": {"code": 404, "message": "Object does not exist"}}
        return {**item, "authenticated": True, "actions": {"download": {"href": f"{self.hub.url}/object/{name}"}}}

    def do_HEAD(self) -> None:
        self._get(body=False)

    def do_GET(self) -> None:
        self._get(body=True)

    def _get(self, body: bool) -> None:
        asked = urlsplit(self.path)
        path, query = unquote(asked.path), parse_qs(asked.query)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        model = self.hub.model
        if path.startswith("/object/"):
            self._file(path.removeprefix("/object/"), body)
        elif path in (
            f"/api/models/{model}",
            f"/api/models/{model}/revision/main",
            f"/api/models/{model}/revision/{COMMIT}",
        ):
            self._json(self._hugging_face_info())
        elif path.startswith(f"/{model}/resolve/{COMMIT}/"):
            self._file(path.removeprefix(f"/{model}/resolve/{COMMIT}/"), body)
        elif path == f"/api/v1/models/{model}/repo/files" and query.get("Revision") == ["master"]:
            self._json({"Code": 200, "Success": True, "Data": {"Files": self._modelscope_files()}})
        elif path == f"/api/v1/models/{model}/repo":
            self._file(query["FilePath"][0], body)
        else:
            self._missing()

    def _hugging_face_info(self) -> dict[str, Any]:
        siblings = []
        for name, data in self.hub.files.items():
            sha1 = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": sha1}
            if len(data) > LARGE:
                entry["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 135}
            siblings.append(entry)
        return {"id": self.hub.model, "modelId": self.hub.model, "sha": COMMIT, "siblings": siblings}

    def _modelscope_files(self) -> list[dict[str, Any]]:
        return [
            {"Path": name, "Name": name, "Type": "blob", "Size": len(data), "Sha256": sha256(data), "Revision": COMMIT}
            for name, data in self.hub.files.items()
        ]

    def _file(self, name: str, body: bool) -> None:
        if name not in self.hub.files or name in self.hub.absent:
            self._missing()
            return
        data = self.hub.content(name)
        stated = self.hub.files[name]
        start = 0
        asked = self.headers.get("Range")
        if asked is not None and body:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start = int(first)
            if start >= len(data):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(data)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            end = min(int(last) if last else len(data) - 1, len(data) - 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
            data = data[start : end + 1]
        else:
            self.send_response(200)
        digest = (
            sha256(stated) if len(stated) > LARGE else hashlib.sha1(b"blob %d\0" % len(stated) + stated).hexdigest()
        )
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{digest}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if len(stated) > LARGE:
            self.send_header("X-Linked-Etag", f'"{digest}"')
            self.send_header("X-Linked-Size", str(len(stated)))
        self.end_headers()
        if not body:
            return
        with suppress(ConnectionError):
            if self.hub.stall_at is not None and start == 0 and len(data) > self.hub.stall_at:
                self.wfile.write(data[: self.hub.stall_at])
                self.wfile.flush()
                self.hub.wait_for_release()
                self.close_connection = True
            else:
                self.wfile.write(data)

    def _json(self, value: object, kind: str = "application/json") -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _missing(self) -> None:
        data = b'{"error": "Repository not found", "Code": 10010205001, "Message": "not found", "Success": false}'
        self.send_response(404)
        self.send_header("Content-Type", "application/json")
        self.send_header("X-Error-Code", "RepoNotFound" if "/resolve/" not in self.path else "EntryNotFound")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
