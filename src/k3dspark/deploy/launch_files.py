"""A launch directory: written whole or not at all, and read back by `launch` and `tune`.

`plan.json` keeps the wish that all files were written from and the checksum of each, so that a later `tune` can write
them again, and so that files changed by hand are noticed before they would be lost.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from k3dspark.checkpoint.files import sync_directory
from k3dspark.checkpoint.jsonfile import read_object
from k3dspark.deploy.manifest import manifest
from k3dspark.deploy.options import DraftFacts, LaunchWish, Settled, settle
from k3dspark.deploy.scripts import health_script, node_script
from k3dspark.deploy.service_unit import UNIT_NAME, unit
from k3dspark.errors import BadInput

PLAN_FILE: Final = "plan.json"
FORMAT: Final = 1
SUPERVISOR: Final = Path(__file__).with_name("supervisor.sh")


@dataclass(frozen=True)
class LaunchDirectory:
    """A directory that `write_launch_files` wrote."""

    path: Path
    settled: Settled
    checksums: Mapping[str, str]

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts file as it is now: people may correct it after the plan."""
        try:
            lines = (self.path / "hosts").read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{self.path / 'hosts'} cannot be read", str(error), "write the plan again") from error
        if len(lines) != self.settled.wish.nodes:
            raise BadInput(
                f"{self.path / 'hosts'} names {len(lines)} hosts",
                f"the plan has {self.settled.wish.nodes} nodes, one host a line",
                "correct that file, or plan again",
            )
        return tuple(lines)

    @property
    def url(self) -> str:
        """Where the head answers."""
        host = self.hosts[0]
        return f"http://{f'[{host}]' if ':' in host else host}:{self.settled.wish.port}"

    def changed(self) -> list[str]:
        """Files that differ from what was written, or are gone; `hosts` may be corrected freely."""
        found = []
        for name, checksum in self.checksums.items():
            path = self.path / name
            if name != "hosts" and (not path.is_file() or _checksum(path.read_bytes()) != checksum):
                found.append(name)
        return found


def launch_files(facts: DraftFacts, wish: LaunchWish) -> tuple[Settled, dict[str, str]]:
    """Every file's text by name. Raises `BadInput` for what the engine cannot do."""
    settled = settle(facts, wish)
    scripts = {f"node-{node}.sh": node_script(settled, node) for node in range(settled.wish.nodes)}
    scripts["health.sh"] = health_script(settled)
    files = {
        **scripts,
        "supervise.sh": SUPERVISOR.read_text(encoding="utf-8"),
        "hosts": "".join(f"{host}\n" for host in settled.wish.hosts),
        UNIT_NAME: unit(settled),
        "kubernetes.yaml": manifest(settled, scripts),
    }
    plan = {
        "format": FORMAT,
        "engine": {"name": settled.engine.name, "version": settled.wish.version},
        "wish": settled.wish.as_json(),
        "draft": asdict(facts),
        "warnings": [{"id": w.id, "what": w.what, "remedy": w.remedy, "source": w.source} for w in settled.warnings],
        "files": {name: _checksum(text.encode()) for name, text in files.items()},
    }
    return settled, {**files, PLAN_FILE: json.dumps(plan, indent=2, ensure_ascii=False) + "\n"}


def write_launch_files(facts: DraftFacts, wish: LaunchWish, out: Path, force: bool = False) -> LaunchDirectory:
    """Write all files into `out`, which must be new, or an older plan and `force`. Raises `BadInput`."""
    home = wish.home or str(out.absolute())
    if not home.startswith("/"):
        raise BadInput(f"--home {home} is no absolute path", "systemd starts nothing else", "pass an absolute path")
    _require_free(out, force)
    settled, files = launch_files(facts, replace(wish, home=home))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise BadInput(f"cannot write {out}", str(error), "choose another place") from error
    try:
        for name, text in files.items():
            _write(temporary / name, text)
        temporary.chmod(0o755)
        sync_directory(temporary)
        _take_place(temporary, out)
    except OSError as error:
        raise BadInput(f"cannot write {out}", str(error), "choose another place") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return LaunchDirectory(out, settled, {n: _checksum(t.encode()) for n, t in files.items() if n != PLAN_FILE})


def read_launch_directory(path: Path) -> LaunchDirectory:
    """A directory that `plan` wrote. Raises `BadInput` when it is none, or of a newer format."""
    if not (path / PLAN_FILE).is_file():
        raise BadInput(
            f"{path} is no launch directory",
            f"it has no {PLAN_FILE}",
            "write one with k3dspark plan DIR --engine ... --out " + str(path),
        )
    plan = read_object(path / PLAN_FILE)
    if plan.get("format") != FORMAT:
        raise BadInput(
            f"{path / PLAN_FILE} has format {plan.get('format')!r}",
            f"this version reads format {FORMAT}",
            "plan again with this version",
        )
    wish, draft, files = plan.get("wish"), plan.get("draft"), plan.get("files")
    if not isinstance(wish, dict) or not isinstance(draft, dict) or not isinstance(files, dict):
        raise BadInput(f"{path / PLAN_FILE} is incomplete", "it lacks wish, draft or files", "plan again")
    try:
        facts = DraftFacts(**draft)
    except TypeError as error:
        raise BadInput(f"{path / PLAN_FILE} is incomplete", str(error), "plan again") from error
    return LaunchDirectory(path, settle(facts, LaunchWish.from_json(wish)), files)


def rewrite(directory: LaunchDirectory, force: bool = False, **changes: Any) -> LaunchDirectory:
    """The same plan with some fields of its wish replaced. Raises `BadInput` when files were changed by hand."""
    changed = directory.changed()
    if changed and not force:
        raise BadInput(
            f"{', '.join(changed)} in {directory.path} differ from what plan wrote",
            "writing the plan again would lose the changes",
            "put them into the plan, or pass --force",
        )
    wish = replace(directory.settled.wish, hosts=directory.hosts, **changes)
    return write_launch_files(directory.settled.facts, wish, directory.path, force=True)


def _require_free(out: Path, force: bool) -> None:
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir() or out.is_symlink():
        raise BadInput(f"{out} is in the way", "it is not a plain directory", "choose another place")
    if not any(out.iterdir()):
        return
    if not (out / PLAN_FILE).is_file():
        raise BadInput(
            f"{out} is not empty", "it holds files that no plan wrote, and they would be lost", "choose another place"
        )
    if not force:
        raise BadInput(f"{out} already holds a plan", "it is not overwritten unasked", "pass --force, or another place")


def _write(path: Path, text: str) -> None:
    mode = 0o755 if path.suffix == ".sh" else 0o644
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    path.chmod(mode)


def _take_place(temporary: Path, out: Path) -> None:
    """Rename the finished directory to its place; an older one stands aside until then, and comes back on failure."""
    if not out.exists():
        temporary.rename(out)
    else:
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent)) / "old"
        out.rename(aside)
        try:
            temporary.rename(out)
        except OSError:
            aside.rename(out)
            raise
        finally:
            shutil.rmtree(aside.parent, ignore_errors=True)
    sync_directory(out.parent)


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
