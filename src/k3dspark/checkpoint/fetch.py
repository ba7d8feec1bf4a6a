"""`fetch`: a checkpoint from a source into a directory, resumed, verified, and recorded in a manifest.

Downloads land in DIR/.k3dspark/download and take their place only when their size and hash are what the source
stated. A run that was killed is continued by the same command.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from k3dspark import __version__
from k3dspark.checkpoint.files import sync_directory, write_json
from k3dspark.checkpoint.jsonfile import read_object
from k3dspark.checkpoint.lock import locked
from k3dspark.checkpoint.manifest import (
    STATE,
    Manifest,
    ManifestFile,
    read_manifest,
    sha256_file,
    write_manifest,
)
from k3dspark.checkpoint.pointer import read_pointer
from k3dspark.checkpoint.remote import PUBLISHED, Listing, RemoteFile, Source, parse_source, require_safe
from k3dspark.checkpoint.space import require_space
from k3dspark.errors import BadInput, EngineFault, K3DSparkError

DOWNLOAD: Final = f"{STATE}/download"
REQUEST: Final = f"{STATE}/request.json"
ATTEMPTS: Final = 2
POLL_SECONDS: Final = 0.5


@dataclass(frozen=True)
class Progress:
    """A moment of a fetch: what is going on ("download" or "verify"), bytes done and in all."""

    stage: str
    done: int
    total: int


Report = Callable[[Progress], None]


def fetch(
    source: str | None,
    directory: Path,
    *,
    revision: str | None = None,
    repull: bool = False,
    report: Report | None = None,
) -> Manifest:
    """Fill `directory` from `source` (None: the published checkpoint) and return the manifest that was written.

    `repull` completes a directory that is already there: a clone whose LFS objects are missing, or an earlier fetch;
    its source is then known, and files that differ are replaced. Raises `BadInput` for a source that does not exist
    or is not safe, and for files in the way; `EngineFault` for network, disk or verification faults.
    """
    if directory.exists() and not directory.is_dir():
        raise BadInput(f"{directory} is not a directory", "a checkpoint is a directory of files", "check --to")
    if repull and not directory.is_dir():
        raise BadInput(f"there is no {directory} to complete", "--repull works on what is there", "leave --repull out")
    created = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with locked(directory):
            return _Fetch(directory, report or (lambda progress: None), repull).run(source, revision)
    except K3DSparkError:
        if created:  # nothing arrived: leave no empty directory behind
            _remove_if_untouched(directory)
        raise


def _remove_if_untouched(directory: Path) -> None:
    state = directory / STATE
    with suppress(OSError):
        if [p.name for p in directory.iterdir()] == [STATE] and not (directory / DOWNLOAD).exists():
            shutil.rmtree(state)
            directory.rmdir()


class _Fetch:
    def __init__(self, directory: Path, report: Report, repull: bool) -> None:
        self.directory = directory
        self.staging = directory / DOWNLOAD
        self.report = report
        self.repull = repull

    def run(self, text: str | None, revision: str | None) -> Manifest:
        _purge_links(self.staging)
        source, revision, exact = self._source(text, revision)
        listing = self._listing(source, revision, exact)
        require_safe(listing, source.name)
        write_json(self.directory / REQUEST, {"source": source.name, "revision": revision or ""})
        done = self._already_there(listing)
        needed = [file for file in sorted(listing.files, key=lambda f: f.size) if file.path not in done]
        self._refuse_to_overwrite(needed)
        missing = sum(file.size for file in needed)
        require_space(self.directory, max(0, missing - _bytes_under(self.staging)))
        with self._watching(missing) as finished:
            for file in needed:
                done[file.path] = self._get(source, listing, file)
                finished.append(file.size)
        manifest = Manifest(
            source=source.name,
            revision=listing.revision,
            fetched_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            tool=f"k3dspark {__version__}",
            files=tuple(ManifestFile(file.path, file.size, done[file.path], file.stated_by) for file in listing.files),
        )
        write_manifest(self.directory, manifest)
        shutil.rmtree(self.staging, ignore_errors=True)
        (self.directory / REQUEST).unlink(missing_ok=True)
        return manifest

    def _listing(self, source: Source, revision: str | None, exact: bool) -> Listing:
        try:
            return source.listing(self.staging, revision)
        except EngineFault:
            if exact or revision is None:
                raise
            # Some servers do not give out a bare commit; the newest is as whole as the one that was cloned.
            return source.listing(self.staging, None)

    def _source(self, text: str | None, revision: str | None) -> tuple[Source, str | None, bool]:
        """The source, the revision to ask it for, and whether only that revision will do."""
        if text is not None:
            return parse_source(text), revision, True
        if not self.repull:
            return parse_source(PUBLISHED), revision, True
        known = self._known_source()
        if known is None:
            raise BadInput(
                f"the source of {self.directory} is not known",
                "it is neither a Git clone nor the result of an earlier fetch",
                f"name it: `k3dspark fetch --repull --to {self.directory} SOURCE`, for instance {PUBLISHED}",
            )
        source, known_revision = known
        return source, revision or known_revision, revision is not None

    def _known_source(self) -> tuple[Source, str | None] | None:
        request = self.directory / REQUEST
        if request.is_file():
            mapping = read_object(request)
            if isinstance(mapping.get("source"), str):
                return parse_source(mapping["source"]), str(mapping.get("revision") or "") or None
        manifest = read_manifest(self.directory)
        if manifest is not None:
            return parse_source(manifest.source), manifest.revision or None
        from k3dspark.checkpoint.source_git import source_of_clone

        return source_of_clone(self.directory)

    # -- what is there already ------------------------------------------------------------------------------------

    def _already_there(self, listing: Listing) -> dict[str, str]:
        """sha256 by path of the files that need no download. Nothing is believed without reading it."""
        whole = [file for file in listing.files if self._has_its_size(file)]
        total = sum(file.size for file in whole)
        seen = 0

        def count(read: int) -> None:
            nonlocal seen
            seen += read
            self.report(Progress("verify", seen, total))

        found = {}
        recorded = self._recorded()
        for file in whole:
            digest = sha256_file(self.directory / file.path, count)
            if self._is(self.directory / file.path, file, digest) and (
                file.sha256 or file.git_sha1 or recorded.get(file.path) == digest
            ):
                found[file.path] = digest
        return found

    def _recorded(self) -> dict[str, str]:
        with suppress(BadInput):
            manifest = read_manifest(self.directory)
            return {file.path: file.sha256 for file in manifest.files} if manifest else {}
        return {}

    def _has_its_size(self, file: RemoteFile) -> bool:
        path = self.directory / file.path
        return not path.is_symlink() and path.is_file() and path.stat().st_size == file.size

    def _is(self, path: Path, file: RemoteFile, digest: str) -> bool:
        if file.sha256 is not None:
            return digest == file.sha256
        return file.git_sha1 is None or _git_sha1(path) == file.git_sha1

    def _refuse_to_overwrite(self, needed: list[RemoteFile]) -> None:
        """Only a pointer, or what an earlier fetch put there, may be replaced without --repull."""
        recorded = self._recorded()
        for file in needed:
            path = self.directory / file.path
            self._require_real_parents(path)
            if self.repull or not os.path.lexists(path) or file.path in recorded or read_pointer(path) is not None:
                continue
            raise BadInput(
                f"{path} is in the way",
                "it is there already, with other content than the source has, and fetch did not put it there",
                "fetch into an empty directory, or pass --repull to have it replaced",
            )

    def _require_real_parents(self, path: Path) -> None:
        for parent in path.relative_to(self.directory).parents:
            place = self.directory / parent
            if place != self.directory and (place.is_symlink() or (place.exists() and not place.is_dir())):
                raise BadInput(
                    f"{place} is in the way", "it is a link or a file where a folder has to be", "remove it first"
                )

    # -- downloading ----------------------------------------------------------------------------------------------

    def _get(self, source: Source, listing: Listing, file: RemoteFile) -> str:
        """Download, verify and place one file; its sha256."""
        problem = ""
        for _ in range(ATTEMPTS):
            path = source.download(self.staging, listing, file)
            problem, digest = self._verify(source, path, file)
            if not problem:
                self._place(path, self.directory / file.path)
                return digest
            with suppress(OSError):
                path.unlink()  # a damaged download cannot be resumed
        raise EngineFault(
            f"{file.path} did not arrive as {source.name} states it",
            f"{problem}, {ATTEMPTS} times in a row",
            "run the command again later, or fetch from another source; the file was not put in place",
        )

    def _verify(self, source: Source, path: Path, file: RemoteFile) -> tuple[str, str]:
        """(what is wrong or nothing, sha256)."""
        if path.is_symlink() or not path.is_file():
            return "the client reported success, but there is no file", ""
        size = path.stat().st_size
        if size != file.size:
            return f"it has {size:,} bytes instead of {file.size:,}", ""
        read = 0

        def count(chunk: int) -> None:
            nonlocal read
            read += chunk
            self.report(Progress("verify", read, size))

        digest = sha256_file(path, count)
        stated = file.sha256
        if stated is None:
            taken = getattr(source, "stated_sha256", None)
            stated = taken(self.staging, file) if taken is not None else None
        if stated is not None and digest != stated:
            return f"its sha256 is {digest} instead of {stated}", digest
        if file.git_sha1 is not None and _git_sha1(path) != file.git_sha1:
            return f"its git hash is not {file.git_sha1}", digest
        return "", digest

    def _place(self, path: Path, to: Path) -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        if path.stat().st_nlink > 1:
            # git-lfs links objects of a repository on the same disk: a copy, so that neither can change the other.
            copy = path.with_name(f"{path.name}.copy")
            shutil.copyfile(path, copy)
            path = copy
        with path.open("rb") as file:
            os.fsync(file.fileno())
        path.chmod(0o644)
        path.replace(to)
        sync_directory(to.parent)

    @contextmanager
    def _watching(self, total: int) -> Iterator[list[int]]:
        """Report the bytes on disk while the block runs; it appends the size of each finished file."""
        finished: list[int] = []
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(POLL_SECONDS):
                self.report(Progress("download", min(total, sum(finished) + _bytes_under(self.staging)), total))

        thread = threading.Thread(target=watch, daemon=True)
        if total:
            thread.start()
        try:
            yield finished
        finally:
            stop.set()
            if total:
                thread.join()
        self.report(Progress("download", total, total))


def _purge_links(staging: Path) -> None:
    """Partial downloads are kept, but never in a tree with links: one could lead a download out of the directory."""
    linked = staging.is_symlink() or any(
        os.path.islink(os.path.join(folder, name))
        for folder, folders, names in os.walk(staging)
        for name in (*folders, *names)
    )
    if staging.is_symlink():
        staging.unlink()
    elif linked:
        shutil.rmtree(staging)


def _git_sha1(path: Path) -> str:
    import hashlib

    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _bytes_under(directory: Path) -> int:
    """Bytes of large files below a directory that others are writing to."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total
