"""A checkpoint from a Git repository with LFS, through the real `git` and `git-lfs`.

The repository is fetched into a bare one of our own, so nothing in a directory from elsewhere (its .git/config, its
hooks, its links) is ever run or followed. Files are written by us, at paths that were checked.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from k3dspark.checkpoint.pointer import POINTER_BYTES, Pointer, parse_pointer, pointer_text
from k3dspark.checkpoint.programs import git_environment, require_program, run
from k3dspark.checkpoint.remote import MAX_FILES, Listing, RemoteFile
from k3dspark.errors import BadInput, EngineFault

_REVISION: Final = re.compile(r"[A-Za-z0-9][\w./\-]{0,200}")
_REGULAR: Final = {"100644", "100755"}


@dataclass(frozen=True)
class GitSource:
    """One repository by URL."""

    url: str
    _pointers: dict[str, Pointer] = field(default_factory=dict, compare=False, repr=False)

    @property
    def name(self) -> str:
        return "git:" + re.sub(r"^([a-z]+://)[^/@]*@", r"\1", self.url)

    def listing(self, staging: Path, revision: str | None) -> Listing:
        require_program("git", "git")
        if revision is not None and not _REVISION.fullmatch(revision):
            raise BadInput(f"{revision[:80]!r} is not a revision", "a branch, tag or commit is", "check --revision")
        repository = staging / "git"
        environment = git_environment(repository)
        _start_over(repository)
        run(["git", "init", "--bare", "--quiet", str(repository)], environment)
        run(["git", "config", "remote.origin.url", self.url], environment)
        run(["git", "config", "core.hooksPath", "/dev/null"], environment)
        commit = self._fetch(environment, revision)
        run(["git", "update-ref", "--no-deref", "HEAD", commit], environment)
        tree = run(["git", "ls-tree", "-r", "-l", "-z", "--full-tree", commit], environment)
        entries = [entry for entry in tree.split(b"\0") if entry]
        if len(entries) > MAX_FILES:
            raise BadInput(f"{self.name} is no checkpoint", f"it has {len(entries)} files", "check the URL")
        return Listing(commit, tuple(self._entry(environment, entry) for entry in entries))

    def _fetch(self, environment: dict[str, str], revision: str | None) -> str:
        command = ["git", "fetch", "--quiet", "--depth", "1", "--no-tags", "--no-recurse-submodules", "--force"]
        try:
            run([*command, "--", "origin", revision or "HEAD"], environment)
        except EngineFault as problem:
            raise EngineFault(
                f"{self.name} cannot be fetched" + (f" at {revision}" if revision else ""),
                problem.why,
                "check the URL, the revision and the network; git's own credentials and proxy settings are used",
            ) from problem
        return run(["git", "rev-parse", "--verify", "FETCH_HEAD^{commit}"], environment).decode().strip()

    def _entry(self, environment: dict[str, str], entry: bytes) -> RemoteFile:
        head, _, raw_path = entry.partition(b"\t")
        mode, kind, sha1, size = head.decode().split()
        try:
            path = raw_path.decode("utf-8")
        except UnicodeDecodeError:
            path = ""  # refused by `require_safe`
        if kind != "blob" or mode not in _REGULAR:
            what = "a symbolic link" if mode == "120000" else "a submodule" if kind == "commit" else f"of mode {mode}"
            raise BadInput(
                f"{self.name} is not safe to fetch", f"{path!r} is {what}", "a checkpoint has regular files only"
            )
        if int(size) <= POINTER_BYTES:
            pointer = parse_pointer(run(["git", "cat-file", "blob", sha1], environment))
            if pointer is not None:
                self._pointers[path] = pointer
                return RemoteFile(path, pointer.size, "lfs", sha256=pointer.sha256)
        return RemoteFile(path, int(size), "git", git_sha1=sha1)

    def download(self, staging: Path, listing: Listing, file: RemoteFile) -> Path:
        repository = staging / "git"
        environment = git_environment(repository)
        pointer = self._pointers.get(file.path)
        if pointer is None:
            to = staging / "blobs" / str(file.git_sha1)
            to.parent.mkdir(parents=True, exist_ok=True)
            with to.open("wb") as writer:
                run(["git", "cat-file", "blob", str(file.git_sha1)], environment, output=writer)
            return to
        require_program("git-lfs", "git-lfs")
        oid = pointer.sha256
        stored = repository / "lfs" / "objects" / oid[:2] / oid[2:4] / oid
        if not stored.is_file() or stored.stat().st_size != pointer.size:
            _adopt_partial(repository, oid)
            try:
                # smudge fetches exactly this object, resuming a partial one, whatever else the tree holds
                run(
                    ["git-lfs", "smudge", "--", file.path],
                    environment,
                    input=pointer_text(pointer),
                    output=subprocess.DEVNULL,
                )
            except EngineFault as problem:
                raise EngineFault(
                    f"Git LFS could not fetch {file.path} ({pointer.size:,} bytes) from {self.name}",
                    problem.why,
                    "run the command again to resume; if the server has lost the object, fetch from another source",
                ) from problem
        if not stored.is_file():
            raise EngineFault(
                f"Git LFS reported success but did not store {file.path}",
                f"there is no {stored.name} in its store",
                "run the command again, or fetch from another source",
            )
        return stored


def _adopt_partial(repository: Path, oid: str) -> None:
    """A git-lfs that was killed leaves its partial file under a random name, and resumes only from OID.part."""
    partial = sorted((repository / "lfs" / "incomplete").glob(f"{oid}*"), key=lambda path: path.stat().st_size)
    for path in partial[:-1]:
        path.unlink()
    if partial:
        partial[-1].replace(partial[-1].with_name(f"{oid}.part"))


def _start_over(repository: Path) -> None:
    """Keep only the LFS objects, which are verified by hash: a directory from elsewhere could bring along the rest."""
    repository.mkdir(parents=True, exist_ok=True)
    for path in repository.iterdir():
        if path.name == "lfs" and path.is_dir() and not path.is_symlink():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def source_of_clone(directory: Path) -> tuple[GitSource, str | None] | None:
    """(source, commit) of a clone, read from its .git without running anything in it; None when it is no clone."""
    git_dir = directory / ".git"
    if git_dir.is_symlink() or not (git_dir / "config").is_file():
        return None
    require_program("git", "git")
    environment = git_environment(git_dir)
    try:
        command = ["git", "config", "--file", str(git_dir / "config"), "--no-includes", "remote.origin.url"]
        url = run(command, environment)
    except EngineFault:
        return None
    from k3dspark.checkpoint.remote import parse_source

    text = url.decode("utf-8", "replace").strip()
    if Path(text).is_absolute():
        text = Path(text).as_uri()
    source = parse_source(f"git:{text}")
    assert isinstance(source, GitSource)
    return source, _head_commit(git_dir)


def _head_commit(git_dir: Path) -> str | None:
    """The commit that HEAD names, from the files: running git there would obey the clone's own configuration."""
    with suppress(OSError, UnicodeDecodeError):
        head = (git_dir / "HEAD").read_text()[:4096].strip()
        if head.startswith("ref: "):
            name = head.removeprefix("ref: ")
            loose = git_dir / name
            if re.fullmatch(r"refs/[\w./\-]+", name) and ".." not in name and loose.is_file():
                head = loose.read_text()[:64].strip()
            else:
                packed = re.search(rf"^([0-9a-f]{{40}}) {re.escape(name)}$", _packed_refs(git_dir), re.MULTILINE)
                head = packed[1] if packed else ""
        if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", head):
            return head
    return None


def _packed_refs(git_dir: Path) -> str:
    path = git_dir / "packed-refs"
    if not path.is_file():
        return ""
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(1 << 20)
