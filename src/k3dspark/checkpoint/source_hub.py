"""Checkpoints from ModelScope and Hugging Face, through their own client libraries.

The clients are trusted to transfer, not to have transferred: every file is verified afterwards by `fetch`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3dspark.checkpoint.remote import Listing, RemoteFile
from k3dspark.errors import BadInput, EngineFault, K3DSparkError

_ABSENT = ("NotFound", "NotExist", "NoRepo", "404")
_FORBIDDEN = ("Gated", "Authentication", "Permission", "Unauthorized", "Forbidden", "401", "403")


@contextmanager
def _client(hub: str, what: str) -> Iterator[None]:
    """Turn a client library's exceptions, which are of many kinds, into ours."""
    try:
        yield
    except (K3DSparkError, MemoryError):
        raise
    except Exception as problem:  # the clients raise requests', httpx' and their own types
        kinds = " ".join(kind.__name__ for kind in type(problem).__mro__)
        status = str(getattr(getattr(problem, "response", None), "status_code", ""))
        words = " ".join(str(problem).split())[:400] or type(problem).__name__
        if any(mark in kinds or mark == status for mark in _FORBIDDEN):
            raise BadInput(
                f"{hub} refuses {what}",
                words,
                "accept the model's terms on its page, or log in with the client's own `login` command",
            ) from problem
        if any(mark in kinds or mark == status for mark in _ABSENT):
            raise BadInput(f"{hub} has no {what}", words, "check the name and the revision") from problem
        raise EngineFault(
            f"{hub} could not be asked for {what}",
            words,
            "check the network (proxies, mirrors) and run the command again: what has arrived is kept",
        ) from problem


def _quiet() -> None:
    """Their progress bars have shown 99 % at half the bytes; ours counts what is on disk."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def _need(library: str, extra: str) -> BadInput:
    return BadInput(
        f"the {library} library is not installed",
        "this source is fetched with its own client",
        f"run `pip install 'k3-dspark[{extra}]'`, or fetch from git:URL, which needs no library",
    )


@dataclass(frozen=True)
class ModelScopeSource:
    """A model on ModelScope, or on the endpoint that MODELSCOPE_ENDPOINT names."""

    model: str

    @property
    def name(self) -> str:
        return f"modelscope:{self.model}"

    def _api(self) -> Any:
        _quiet()
        try:
            import modelscope  # noqa: F401 - the documented library; its hub part does the work
            from modelscope_hub import HubApi
        except ImportError as problem:
            raise _need("modelscope", "modelscope") from problem
        logging.getLogger("modelscope_hub").setLevel(logging.ERROR)  # its retries end in an error of ours or in success
        return HubApi(endpoint=_environment("MODELSCOPE_ENDPOINT"))

    def listing(self, staging: Path, revision: str | None) -> Listing:
        api = self._api()
        revision = revision or "master"
        with _client("ModelScope", f"{self.model} at {revision}"):
            entries = api.list_repo_files(self.model, "model", revision=revision)
        files = [entry for entry in entries if entry.type != "tree"]
        return Listing(revision, tuple(_stated(file.path, file.size, file.sha256) for file in files))

    def download(self, staging: Path, listing: Listing, file: RemoteFile) -> Path:
        to = staging / "modelscope"
        with _client("ModelScope", f"{file.path} of {self.model}"):
            # With the size it fetches ranges in parallel; the hash is ours to check.
            self._api().download_file(
                self.model, "model", file.path, revision=listing.revision, local_dir=to, file_size=file.size or None
            )
        return to / file.path


@dataclass(frozen=True)
class HuggingFaceSource:
    """A model on Hugging Face, or on the endpoint that HF_ENDPOINT names."""

    model: str

    @property
    def name(self) -> str:
        return f"hf:{self.model}"

    def listing(self, staging: Path, revision: str | None) -> Listing:
        _quiet()
        try:
            from huggingface_hub import HfApi
        except ImportError as problem:
            raise _need("huggingface_hub", "huggingface") from problem
        with _client("Hugging Face", f"{self.model} at {revision or 'main'}"):
            info = HfApi(_environment("HF_ENDPOINT")).model_info(self.model, revision=revision, files_metadata=True)
            files = [
                _stated(entry.rfilename, entry.size, entry.lfs.sha256)
                if entry.lfs
                else RemoteFile(entry.rfilename, entry.size or 0, "hub", git_sha1=entry.blob_id)
                for entry in info.siblings or []
            ]
        if info.sha is None:
            raise EngineFault(f"Hugging Face names no commit of {self.model}", "its answer has none", "try again later")
        return Listing(info.sha, tuple(files))

    def download(self, staging: Path, listing: Listing, file: RemoteFile) -> Path:
        _quiet()
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        to = staging / "huggingface" / file.path
        to.parent.mkdir(parents=True, exist_ok=True)
        endpoint = _environment("HF_ENDPOINT")
        url = hf_hub_url(self.model, file.path, revision=listing.revision, endpoint=endpoint)
        to.touch()
        with _client("Hugging Face", f"{file.path} of {self.model}"), to.open("r+b") as writer:
            # hf_hub_download of today starts over after a kill; the transfer beneath it resumes where it is told to.
            kept = min(writer.seek(0, os.SEEK_END), file.size)
            writer.truncate(kept)
            writer.seek(kept)
            if kept < file.size or file.size == 0:
                http_get(url, writer, resume_size=kept, headers=build_hf_headers(), expected_size=file.size)
        return to


def _environment(name: str) -> str | None:
    """The endpoint of a mirror, read now: the libraries look only once, when they are imported or first used."""
    return os.environ.get(name) or None


def _stated(path: str, size: int | None, sha256: str | None) -> RemoteFile:
    digest = sha256.lower() if sha256 and len(sha256) == 64 else None
    return RemoteFile(path, -1 if size is None else size, "hub", sha256=digest)
