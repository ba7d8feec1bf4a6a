"""What was fetched from where: a record that lets `inspect` verify a checkpoint years later, offline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from k3dspark.checkpoint.files import write_json
from k3dspark.checkpoint.findings import Finding, error
from k3dspark.checkpoint.jsonfile import read_object
from k3dspark.errors import BadInput

STATE: Final = ".k3dspark"
MANIFEST: Final = f"{STATE}/manifest.json"
FORMAT: Final = 1
CHUNK_BYTES: Final = 8 << 20
# Hashing is quick below this, so `inspect` does it unasked.
SMALL_BYTES: Final = 16 << 20
MAX_FILES: Final = 10_000


@dataclass(frozen=True)
class ManifestFile:
    """One fetched file. `stated_by` says who vouched for the sha256: lfs, hub, git or copy."""

    path: str
    size: int
    sha256: str
    stated_by: str


@dataclass(frozen=True)
class Manifest:
    """Where a checkpoint came from (`source`, `revision`), when, and every file of it."""

    source: str
    revision: str
    fetched_at: str
    tool: str
    files: tuple[ManifestFile, ...]


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace the directory's manifest, at once."""
    (directory / STATE).mkdir(exist_ok=True)
    write_json(directory / MANIFEST, {"format": FORMAT, **asdict(manifest)})


def read_manifest(directory: Path) -> Manifest | None:
    """The directory's manifest, or None. Raises `BadInput` when it is damaged or names a path outside."""
    path = directory / MANIFEST
    if (directory / STATE).is_symlink() or not path.is_file():
        return None
    mapping = read_object(path)
    files = mapping.get("files")
    texts = [mapping.get(name) for name in ("source", "revision", "fetched_at", "tool")]
    if mapping.get("format") != FORMAT or not all(isinstance(t, str) for t in texts) or not isinstance(files, list):
        raise _damaged(path, "it is not a manifest of this format")
    if len(files) > MAX_FILES:
        raise _damaged(path, f"it names {len(files)} files")
    source, revision, fetched_at, tool = map(str, texts)
    return Manifest(source, revision, fetched_at, tool, tuple(_manifest_file(path, item) for item in files))


def _manifest_file(path: Path, item: Any) -> ManifestFile:
    if not isinstance(item, dict) or set(item) != {"path", "size", "sha256", "stated_by"}:
        raise _damaged(path, "an entry is not path, size, sha256 and stated_by")
    name, size, digest, by = item["path"], item["size"], item["sha256"], item["stated_by"]
    sized = isinstance(size, int) and not isinstance(size, bool) and size >= 0
    hexadecimal = isinstance(digest, str) and len(digest) == 64 and set(digest) <= set("0123456789abcdef")
    if not (isinstance(name, str) and sized and hexadecimal and isinstance(by, str)):
        raise _damaged(path, "an entry has a value of another kind")
    if not is_plain_path(name):
        raise _damaged(path, f"it names {name[:120]!r}, which is not a path inside the directory")
    return ManifestFile(name, size, digest, by)


def _damaged(path: Path, why: str) -> BadInput:
    return BadInput(f"{path} cannot be used", why, "delete it and fetch again to have the files verified anew")


def is_plain_path(name: str) -> bool:
    """Whether a path from elsewhere stays inside the directory it is joined to, on any system."""
    parts = PurePosixPath(name).parts
    return (
        0 < len(name) <= 1024
        and len(parts) <= 32
        and not any(ord(character) < 32 or character in '\\:*?"<>|' for character in name)
        and not name.startswith("/")
        and name == "/".join(parts)
        and all(part not in ("..", ".") and part.lower() != ".git" and not part.endswith((" ", ".")) for part in parts)
        and parts[0] != STATE
    )


def sha256_file(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """Hex sha256 of a file; `progress` gets the bytes of each chunk."""
    import hashlib  # takes a while to load, and most inspections hash nothing

    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            if progress is not None:
                progress(len(chunk))
    return digest.hexdigest()


def manifest_findings(directory: Path, verify: bool) -> list[Finding]:
    """Files that are not what the manifest recorded. Hashes only small files unless `verify`."""
    try:
        manifest = read_manifest(directory)
    except BadInput as problem:
        return [error("manifest.damaged", MANIFEST, problem.what, problem.why, problem.remedy)]
    if manifest is None:
        if not verify:
            return []
        return [
            error(
                "manifest.missing",
                MANIFEST,
                "there is no manifest to verify against",
                "`k3dspark fetch` writes one; this directory was filled otherwise",
                "run `k3dspark fetch --repull --to DIR SOURCE` to verify it against its source",
            )
        ]
    findings = [_judge(directory, manifest, file, verify) for file in manifest.files]
    return [finding for finding in findings if finding is not None]


def _judge(directory: Path, manifest: Manifest, file: ManifestFile, verify: bool) -> Finding | None:
    path = directory / file.path
    origin = f"the manifest records it from {manifest.source} at {manifest.revision}"
    cure = "run `k3dspark fetch --repull --to DIR` to get it again"
    if not path.resolve().is_relative_to(directory.resolve()) or path.is_symlink() or not path.is_file():
        return error("manifest.file_missing", file.path, f"{file.path} is missing", origin, cure)
    size = path.stat().st_size
    if size != file.size:
        return error(
            "manifest.size",
            file.path,
            f"{file.path} has {size:,} bytes, and was fetched with {file.size:,}",
            origin,
            cure,
        )
    if (verify or size <= SMALL_BYTES) and (digest := sha256_file(path)) != file.sha256:
        return error(
            "manifest.sha256",
            file.path,
            f"{file.path} is not the file that was fetched: its sha256 is {digest}",
            f"{origin} with sha256 {file.sha256} (stated by {file.stated_by})",
            cure,
        )
    return None
