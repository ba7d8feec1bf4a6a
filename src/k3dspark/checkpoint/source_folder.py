"""A checkpoint from another directory, for instance a shared disk or a Hugging Face cache."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from k3dspark.checkpoint.manifest import CHUNK_BYTES, STATE
from k3dspark.checkpoint.pointer import read_pointer
from k3dspark.checkpoint.remote import MAX_FILES, Listing, RemoteFile
from k3dspark.errors import BadInput, EngineFault


@dataclass(frozen=True)
class FolderSource:
    """Copies regular files; links are followed only within the directory or into the blobs of a cache."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    def listing(self, staging: Path, revision: str | None) -> Listing:
        if revision is not None:
            raise BadInput(f"{self.path} has no revisions", "it is a plain directory", "leave --revision out")
        files = []
        for folder, folders, names in os.walk(self.path, onerror=self._unreadable):
            folders[:] = sorted(name for name in folders if name not in (".git", STATE, ".cache"))
            for name in sorted(names):
                path = Path(folder) / name
                files.append(self._file(path))
                if len(files) > MAX_FILES:
                    raise BadInput(f"{self.path} is no checkpoint", f"it has over {MAX_FILES} files", "check the path")
        return Listing("", tuple(files))

    def _unreadable(self, problem: OSError) -> None:
        raise BadInput(f"{self.path} cannot be read", str(problem), "check the permissions") from problem

    def _file(self, path: Path) -> RemoteFile:
        relative = path.relative_to(self.path).as_posix()
        real = path.resolve()
        blobs = self.path.parents[1] / "blobs" if self.path.parent.name == "snapshots" else None
        if not (real.is_relative_to(self.path) or (blobs is not None and real.parent == blobs)) or not real.is_file():
            raise BadInput(
                f"{relative} is a link out of {self.path}, or no regular file",
                "a checkpoint could point at any file of this machine, so it is not followed",
                "copy the file itself there first",
            )
        if read_pointer(real) is not None:
            raise BadInput(
                f"{relative} in {self.path} is a Git LFS pointer, not the file itself",
                "that directory is a clone whose LFS objects are missing",
                f"run `k3dspark fetch --repull --to {self.path}` first, or fetch from its repository",
            )
        return RemoteFile(relative, real.stat().st_size, "copy")

    def download(self, staging: Path, listing: Listing, file: RemoteFile) -> Path:
        import hashlib

        source, to = self.path / file.path, staging / "copy" / file.path
        to.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        try:
            with source.open("rb") as reader, to.open("ab") as writer:
                # What an earlier run copied is kept; its bytes are hashed from the source, so damage shows below.
                kept = min(writer.tell(), file.size)
                writer.truncate(kept)
                while chunk := reader.read(min(CHUNK_BYTES, kept) if kept else CHUNK_BYTES):
                    digest.update(chunk)
                    if kept:
                        kept -= len(chunk)
                    else:
                        writer.write(chunk)
                writer.flush()
                os.fsync(writer.fileno())
        except OSError as problem:
            raise EngineFault(
                f"copying {file.path} failed", str(problem), "run the command again to resume"
            ) from problem
        (to.parent / f"{to.name}.sha256").write_text(digest.hexdigest())
        return to

    def stated_sha256(self, staging: Path, file: RemoteFile) -> str:
        """The hash of the source's bytes, taken while they were copied."""
        path = staging / "copy" / file.path
        return (path.parent / f"{path.name}.sha256").read_text()
