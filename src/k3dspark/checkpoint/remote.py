"""Where a checkpoint can come from: what every source offers, and how a source is written on the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from k3dspark.checkpoint.manifest import is_plain_path
from k3dspark.errors import BadInput

PUBLISHED: Final = "modelscope:Eco-Tech/Kimi-K3-DSpark-MLA-NPU"
MAX_FILES: Final = 10_000
MAX_BYTES: Final = 1 << 50
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.\-]{0,95}/[A-Za-z0-9][\w.\-]{0,95}")
_GIT_URL: Final = re.compile(r"(https?|ssh|git|file)://\S+|[\w.\-]+@[\w.\-]+:\S+")


@dataclass(frozen=True)
class RemoteFile:
    """One file as its source states it; a hash is None where the source states none."""

    path: str
    size: int
    stated_by: str
    sha256: str | None = None
    git_sha1: str | None = None


@dataclass(frozen=True)
class Listing:
    """All files of a source at one revision."""

    revision: str
    files: tuple[RemoteFile, ...]


class Source(Protocol):
    """Lists and downloads. Downloads land under `staging` and resume what an earlier, killed run left there."""

    @property
    def name(self) -> str:
        """How the source is written on the command line and in the manifest, without credentials."""
        ...

    def listing(self, staging: Path, revision: str | None) -> Listing:
        """Raises `BadInput` when there is no such source or revision, `EngineFault` when it cannot be reached."""
        ...

    def download(self, staging: Path, listing: Listing, file: RemoteFile) -> Path:
        """The downloaded file's path. It is verified by the caller. Raises `EngineFault`."""
        ...


def parse_source(text: str) -> Source:
    """`git:URL`, `file://…`, `modelscope:ORG/NAME`, `hf:ORG/NAME` or a directory. Raises `BadInput` for others."""
    kind, _, rest = text.partition(":")
    if kind in ("modelscope", "hf"):
        from k3dspark.checkpoint.source_hub import HuggingFaceSource, ModelScopeSource

        if not _HUB_NAME.fullmatch(rest):
            raise BadInput(f"{text[:120]!r} names no model", f"a model is written {kind}:ORG/NAME", "check the name")
        return ModelScopeSource(rest) if kind == "modelscope" else HuggingFaceSource(rest)
    url = rest if kind == "git" else text
    if kind == "git" or text.startswith("file://") or (_GIT_URL.fullmatch(text) and text.endswith(".git")):
        from k3dspark.checkpoint.source_git import GitSource

        if not _GIT_URL.fullmatch(url):
            raise BadInput(
                f"{url[:120]!r} is not a repository's URL",
                "https://, ssh://, git://, file:// and user@host:path are understood",
                "write git:URL; for a local repository git:file:///absolute/path",
            )
        return GitSource(url)
    return _local(text)


def _local(text: str) -> Source:
    path = Path(text).expanduser()
    if not path.is_dir():
        raise BadInput(
            f"{text[:120]!r} is not a source",
            "it is neither a directory nor one of git:URL, modelscope:ORG/NAME, hf:ORG/NAME",
            "check the spelling",
        )
    if (path / "HEAD").is_file() and (path / "objects").is_dir():
        from k3dspark.checkpoint.source_git import GitSource

        return GitSource(path.resolve().as_uri())
    from k3dspark.checkpoint.source_folder import FolderSource

    return FolderSource(path.resolve())


def require_safe(listing: Listing, source: str) -> None:
    """Raise `BadInput` for a listing with a path that leaves the directory, collides, or is beyond all sizes."""
    seen: dict[str, str] = {}
    for file in listing.files:
        problem = None
        if not is_plain_path(file.path):
            problem = f"it lists {file.path[:120]!r}, which is not a path inside a directory"
        elif file.path.casefold() in seen:
            problem = f"it lists both {seen[file.path.casefold()]!r} and {file.path!r}, one name on many systems"
        elif not 0 <= file.size < MAX_BYTES:
            problem = f"it states {file.size} bytes for {file.path!r}"
        seen[file.path.casefold()] = file.path
        if problem is not None:
            raise BadInput(f"{source} is not safe to fetch", problem, "do not use it, or ask its owner to correct it")
    for path in seen.values():
        parents = path.split("/")[:-1]
        for depth in range(1, len(parents) + 1):
            if "/".join(parents[:depth]).casefold() in seen:
                raise BadInput(f"{source} is not safe to fetch", f"{path!r} lies inside another file", "do not use it")
    if not 0 < len(listing.files) <= MAX_FILES:
        raise BadInput(f"{source} cannot be fetched", f"it lists {len(listing.files)} files", "check the name")
