"""`fetch`, from real Git LFS repositories, real hub clients against a hub on loopback, and folders."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from k3dspark.checkpoint.fetch import Progress, fetch
from k3dspark.checkpoint.inspection import inspect_checkpoint
from k3dspark.checkpoint.lock import locked
from k3dspark.checkpoint.manifest import is_plain_path, read_manifest
from k3dspark.checkpoint.pointer import Pointer, pointer_text
from k3dspark.checkpoint.remote import Listing, RemoteFile, parse_source, require_safe
from k3dspark.checkpoint.synth import synthesise
from k3dspark.errors import BadInput, EngineFault, K3DSparkError
from loopback_hub import COMMIT, Hub, sha256

needs_git_lfs = pytest.mark.skipif(
    shutil.which("git") is None or shutil.which("git-lfs") is None,
    reason="git and git-lfs are not installed (bash scripts/system-packages.sh installs them)",
)
WEIGHTS = ("model.safetensors", "lm_head.safetensors")


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("synth") / "pair"
    synthesise(directory, tiny=True)
    return directory / "draft"


@pytest.fixture
def files(draft: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in draft.iterdir()}


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """git with a configuration of its own, in which LFS is installed."""
    for name in list(os.environ):
        if name.startswith("GIT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    (tmp_path / "gitconfig").write_text("[user]\n\tname = t\n\temail = t@example.org\n[init]\n\tdefaultBranch = main\n")

    def run(*arguments: str, cwd: Path | None = None, **environment: str) -> str:
        done = subprocess.run(
            ["git", *arguments],
            cwd=cwd or tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("lfs", "install", "--skip-repo")
    return run


@pytest.fixture
def repository(git: Callable[..., str], draft: Path, tmp_path: Path) -> Path:
    """A bare repository whose weights are LFS objects."""
    work, bare = tmp_path / "work", tmp_path / "repo.git"
    git("init", "--quiet", "--bare", str(bare))
    shutil.copytree(draft, work)
    git("init", "--quiet", cwd=work)
    git("lfs", "track", "*.safetensors", cwd=work)
    git("add", "-A", cwd=work)
    git("commit", "--quiet", "-m", "draft", cwd=work)
    git("push", "--quiet", bare.as_uri(), "HEAD:refs/heads/main", cwd=work)
    return bare


@pytest.fixture
def clone(git: Callable[..., str], repository: Path, tmp_path: Path) -> Path:
    """A clone whose LFS objects are missing: pointers instead of weights."""
    git("clone", "--quiet", repository.as_uri(), "clone", GIT_LFS_SKIP_SMUDGE="1")
    assert (tmp_path / "clone" / "model.safetensors").stat().st_size < 140
    return tmp_path / "clone"


def same(directory: Path, files: dict[str, bytes]) -> bool:
    return all((directory / name).read_bytes() == data for name, data in files.items())


def faults(directory: Path) -> list[str]:
    return [finding.id for finding in inspect_checkpoint(directory, verify=True).findings]


def k3dspark(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "from k3dspark.cli.main import main; main()", *arguments],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# -- Git with LFS ---------------------------------------------------------------------------------------------------


@needs_git_lfs
def test_a_repository_is_fetched_verified_and_recorded(
    repository: Path, files: dict[str, bytes], tmp_path: Path
) -> None:
    seen: list[Progress] = []
    manifest = fetch(f"git:{repository.as_uri()}", tmp_path / "out", report=seen.append)
    assert same(tmp_path / "out", files)
    assert faults(tmp_path / "out") == []
    assert read_manifest(tmp_path / "out") == manifest
    by_path = {file.path: file for file in manifest.files}
    assert by_path["model.safetensors"].stated_by == "lfs"
    assert by_path["config.json"].stated_by == "git"
    assert by_path["model.safetensors"].sha256 == sha256(files["model.safetensors"])
    assert len(manifest.revision) == 40
    assert seen[-1].done == seen[-1].total
    assert not (tmp_path / "out/.k3dspark/download").exists()


@needs_git_lfs
def test_the_fetched_files_share_nothing_with_a_repository_on_the_same_disk(repository: Path, tmp_path: Path) -> None:
    fetch(f"git:{repository.as_uri()}", tmp_path / "out")
    for name in WEIGHTS:
        assert (tmp_path / "out" / name).stat().st_nlink == 1


@needs_git_lfs
def test_a_clone_without_its_objects_is_completed(
    clone: Path, files: dict[str, bytes], git: Callable[..., str]
) -> None:
    assert faults(clone)[:2] == ["file.lfs_pointer", "file.lfs_pointer"]
    manifest = fetch(None, clone, repull=True)
    assert same(clone, files)
    assert faults(clone) == []
    assert manifest.revision == git("rev-parse", "HEAD", cwd=clone).strip()
    git("add", "-u", cwd=clone)  # git compares contents then, and finds what was committed
    assert git("status", "--short", cwd=clone) == ""


@needs_git_lfs
def test_completing_runs_nothing_that_the_clone_brought_along(
    clone: Path, files: dict[str, bytes], tmp_path: Path
) -> None:
    trap = tmp_path / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/sprung\ncat\n")
    trap.chmod(0o755)
    for hook in ("post-checkout", "post-merge", "reference-transaction", "fsmonitor-watchman"):
        shutil.copy(trap, clone / ".git/hooks" / hook)
    with (clone / ".git/config").open("a") as config:
        config.write(f"[core]\n\tfsmonitor = {trap}\n\tsshCommand = {trap}\n\tpager = {trap}\n")
        config.write(f'[filter "lfs"]\n\tsmudge = {trap}\n\tprocess = {trap}\n\tclean = {trap}\n')
        config.write(f'[lfs "customtransfer.x"]\n\tpath = {trap}\n[lfs]\n\tstandalonetransferagent = x\n')
    fetch(None, clone, repull=True)
    assert same(clone, files)
    assert not (tmp_path / "sprung").exists()


@needs_git_lfs
def test_a_planted_download_area_is_not_trusted(clone: Path, files: dict[str, bytes], tmp_path: Path) -> None:
    trap = tmp_path / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/sprung\ncat\n")
    trap.chmod(0o755)
    planted = clone / ".k3dspark/download/git"
    (planted / "hooks").mkdir(parents=True)
    (planted / "HEAD").write_text("ref: refs/heads/main\n")
    (planted / "config").write_text(f"[core]\n\tbare = true\n\tfsmonitor = {trap}\n\tsshCommand = {trap}\n")
    shutil.copy(trap, planted / "hooks/reference-transaction")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for place in ("copy", "blobs", "huggingface"):
        (clone / ".k3dspark/download" / place).mkdir()
        (clone / ".k3dspark/download" / place / "model.safetensors").symlink_to(victim)
    fetch(None, clone, repull=True)
    assert same(clone, files)
    assert victim.read_text() == "mine"
    assert not (tmp_path / "sprung").exists()


@needs_git_lfs
def test_repull_gets_a_file_that_was_lost_and_one_that_was_damaged(
    repository: Path, files: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    fetch(f"git:{repository.as_uri()}", out)
    (out / "lm_head.safetensors").unlink()
    (out / "model.safetensors").write_bytes(b"\0" * len(files["model.safetensors"]))
    assert set(faults(out)) == {"lm_head.missing", "file.not_safetensors"}
    fetch(None, out, repull=True)
    assert same(out, files)


@needs_git_lfs
def test_a_second_fetch_downloads_nothing(repository: Path, tmp_path: Path, files: dict[str, bytes]) -> None:
    fetch(f"git:{repository.as_uri()}", tmp_path / "out")
    inode = (tmp_path / "out/model.safetensors").stat().st_ino
    shutil.rmtree(repository / "lfs")
    fetch(f"git:{repository.as_uri()}", tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").stat().st_ino == inode


@needs_git_lfs
def test_an_object_that_the_server_lost_is_an_engine_fault_and_leaves_no_file(repository: Path, tmp_path: Path) -> None:
    shutil.rmtree(repository / "lfs/objects")
    with pytest.raises(EngineFault, match="Git LFS could not fetch"):
        fetch(f"git:{repository.as_uri()}", tmp_path / "out")
    assert not any((tmp_path / "out" / name).exists() for name in WEIGHTS)


@needs_git_lfs
def test_a_revision_is_fetched_as_asked(
    repository: Path, tmp_path: Path, git: Callable[..., str], files: dict[str, bytes]
) -> None:
    work = tmp_path / "work"
    first = git("rev-parse", "HEAD", cwd=work).strip()
    (work / "config.json").write_text("{}")
    git("commit", "--quiet", "-am", "worse", cwd=work)
    git("push", "--quiet", repository.as_uri(), "HEAD:refs/heads/main", cwd=work)
    assert fetch(f"git:{repository.as_uri()}", tmp_path / "old", revision=first).revision == first
    assert same(tmp_path / "old", files)
    fetch(f"git:{repository.as_uri()}", tmp_path / "new", revision="main")
    assert (tmp_path / "new/config.json").read_text() == "{}"
    with pytest.raises(EngineFault, match="cannot be fetched at nowhere"):
        fetch(f"git:{repository.as_uri()}", tmp_path / "x", revision="nowhere")


@needs_git_lfs
@pytest.mark.parametrize("kind", ["symlink", "submodule", "path"])
def test_a_repository_that_reaches_outside_is_refused(
    repository: Path, tmp_path: Path, git: Callable[..., str], kind: str
) -> None:
    work = tmp_path / "work"
    if kind == "symlink":
        (work / "README.md").symlink_to("/etc/passwd")
        git("add", "README.md", cwd=work)
    elif kind == "submodule":
        git("update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},sub", cwd=work)
    else:
        blob = git("hash-object", "-w", "config.json", cwd=work).strip()
        git("update-index", "--add", "--cacheinfo", f"100644,{blob},a\\..\\b", cwd=work)
    git("commit", "--quiet", "-m", "worse", cwd=work)
    git("push", "--quiet", repository.as_uri(), "HEAD:refs/heads/main", cwd=work)
    with pytest.raises(BadInput, match="not safe to fetch"):
        fetch(f"git:{repository.as_uri()}", tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.fixture
def big(files: dict[str, bytes]) -> dict[str, bytes]:
    """The draft with a larger file beside it, to be killed in."""
    return {**files, "extra.bin": os.urandom(1 << 20) * 24}


@pytest.fixture
def lfs_over_http(big: dict[str, bytes], git: Callable[..., str], tmp_path: Path) -> Iterator[tuple[Hub, Path]]:
    """A repository whose LFS objects come from a server over HTTP, as .lfsconfig says."""
    with Hub(big) as hub:
        work, bare = tmp_path / "http-work", tmp_path / "http.git"
        git("init", "--quiet", "--bare", str(bare))
        work.mkdir()
        git("init", "--quiet", cwd=work)
        (work / ".lfsconfig").write_text(f"[lfs]\n\turl = {hub.url}/lfs\n")
        for name, data in big.items():
            large = name.endswith((".safetensors", ".bin"))
            (work / name).write_bytes(pointer_text(Pointer(sha256(data), len(data))) if large else data)
        git("add", "-A", cwd=work)
        git("commit", "--quiet", "-m", "draft", cwd=work)
        git("push", "--quiet", bare.as_uri(), "HEAD:refs/heads/main", cwd=work)
        yield hub, bare


def kill_once_half_is_there(command: list[str], directory: Path, hub: Hub, **environment: str) -> None:
    """Start a fetch that stalls in the middle of the large file, and SIGKILL it there."""
    hub.stall_at = 16 << 20
    process = k3dspark(*command, **environment)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        partial = sum(p.stat().st_size for p in directory.rglob("*") if p.is_file() and p.stat().st_size > 1 << 20)
        if partial >= 8 << 20:
            break
        time.sleep(0.05)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    place = directory / "extra.bin"
    assert not place.exists() or place.stat().st_size < 140  # a clone's pointer
    hub.stall_at = None
    hub.requests.clear()


@needs_git_lfs
@pytest.mark.parametrize("how", ["fetch", "repull"])
def test_a_killed_git_fetch_resumes_completes_and_verifies(
    lfs_over_http: tuple[Hub, Path], big: dict[str, bytes], tmp_path: Path, git: Callable[..., str], how: str
) -> None:
    hub, bare = lfs_over_http
    out = tmp_path / "out"
    source = None if how == "repull" else f"git:{bare.as_uri()}"
    if how == "repull":
        git("clone", "--quiet", bare.as_uri(), str(out), GIT_LFS_SKIP_SMUDGE="1")
    command = ["fetch", "--to", str(out), *(["--repull"] if source is None else [source])]
    kill_once_half_is_there(command, out, hub)
    fetch(source, out, repull=source is None)
    assert same(out, big)
    assert faults(out) == ["file.pickle"]  # extra.bin; nothing else
    assert any(int(asked.removeprefix("bytes=").split("-")[0]) > 0 for asked in hub.ranges())


# -- hubs -----------------------------------------------------------------------------------------------------------

HUBS = ["modelscope", "hf"]


@pytest.fixture(params=HUBS)
def hub_source(
    request: pytest.FixtureRequest, big: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[Hub, str]]:
    pytest.importorskip("modelscope_hub" if request.param == "modelscope" else "huggingface_hub")
    with Hub(big) as hub:
        for name, value in {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "MODELSCOPE_ENDPOINT": hub.url,
            "MODELSCOPE_CACHE": str(tmp_path / "ms"),
            "MODELSCOPE_HOME": str(tmp_path / "ms-home"),
            "no_proxy": "127.0.0.1",
            "NO_PROXY": "127.0.0.1",
        }.items():
            monkeypatch.setenv(name, value)
        yield hub, f"{request.param}:org/name"


def test_a_hub_is_fetched_with_its_own_client_and_verified(
    hub_source: tuple[Hub, str], big: dict[str, bytes], tmp_path: Path
) -> None:
    _, source = hub_source
    manifest = fetch(source, tmp_path / "out")
    assert same(tmp_path / "out", big)
    assert manifest.source == source
    assert manifest.revision == (COMMIT if source.startswith("hf") else "master")
    assert {file.stated_by for file in manifest.files} == {"hub"}
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted([*big, ".k3dspark"])


@pytest.mark.parametrize("fault", ["damaged", "short"])
def test_a_file_that_is_not_what_the_hub_states_never_takes_its_place(
    hub_source: tuple[Hub, str], tmp_path: Path, fault: str
) -> None:
    hub, source = hub_source
    getattr(hub, fault).add("model.safetensors")
    with pytest.raises(EngineFault) as caught:
        fetch(source, tmp_path / "out")
    assert "model.safetensors" in caught.value.what
    assert not (tmp_path / "out/model.safetensors").exists()
    getattr(hub, fault).clear()
    fetch(source, tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == hub.files["model.safetensors"]


def test_a_file_that_the_hub_lists_and_does_not_have_is_an_error(hub_source: tuple[Hub, str], tmp_path: Path) -> None:
    hub, source = hub_source
    hub.absent.add("lm_head.safetensors")
    with pytest.raises(K3DSparkError, match=r"lm_head\.safetensors"):
        fetch(source, tmp_path / "out")
    assert read_manifest(tmp_path / "out") is None


def test_a_model_that_does_not_exist_is_bad_input(hub_source: tuple[Hub, str], tmp_path: Path) -> None:
    _, source = hub_source
    with pytest.raises(BadInput, match="has no"):
        fetch(source.replace("org/name", "org/other"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_killed_hub_fetch_resumes_completes_and_verifies(
    hub_source: tuple[Hub, str], big: dict[str, bytes], tmp_path: Path
) -> None:
    hub, source = hub_source
    out = tmp_path / "out"
    kill_once_half_is_there(["fetch", source, "--to", str(out)], out, hub)
    fetch(source, out)
    assert same(out, big)
    assert any(int(asked.removeprefix("bytes=").split("-")[0]) > 0 for asked in hub.ranges())


def test_a_listing_that_reaches_outside_is_refused(hub_source: tuple[Hub, str], tmp_path: Path) -> None:
    hub, source = hub_source
    hub.files["../escaped.txt"] = b"x"
    with pytest.raises(BadInput, match="not a path inside a directory"):
        fetch(source, tmp_path / "out")
    assert not (tmp_path / "escaped.txt").exists()


def test_a_hub_that_cannot_be_reached_is_an_engine_fault(
    hub_source: tuple[Hub, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, source = hub_source
    if source.startswith("modelscope"):
        pytest.skip("the client retries for seven seconds")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(EngineFault, match="could not be asked"):
        fetch(source, tmp_path / "out")


def test_a_missing_client_library_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, source, extra in (
        ("modelscope", "modelscope:a/b", "modelscope"),
        ("huggingface_hub", "hf:a/b", "huggingface"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(BadInput, match=rf"k3-dspark\[{extra}\]"):
            fetch(source, tmp_path / "out")


# -- folders --------------------------------------------------------------------------------------------------------


def test_a_folder_is_copied_and_verified(draft: Path, files: dict[str, bytes], tmp_path: Path) -> None:
    manifest = fetch(str(draft), tmp_path / "out")
    assert same(tmp_path / "out", files)
    assert {file.stated_by for file in manifest.files} == {"copy"}
    assert faults(tmp_path / "out") == []


def test_a_partial_copy_is_continued_and_a_damaged_one_is_replaced(
    draft: Path, files: dict[str, bytes], tmp_path: Path
) -> None:
    for begun in (files["model.safetensors"][:1000], b"\xff" * 1000, b"\xff" * 10_000_000):
        out = tmp_path / f"out{len(begun)}{begun[0]}"
        partial = out / ".k3dspark/download/copy/model.safetensors"
        partial.parent.mkdir(parents=True)
        partial.write_bytes(begun)
        fetch(str(draft), out)
        assert same(out, files)


def test_a_clone_of_pointers_is_no_source(clone: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="Git LFS pointer") as caught:
        fetch(str(clone), tmp_path / "out")
    assert "--repull" in caught.value.remedy


def test_a_link_out_of_a_folder_is_not_followed(draft: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(draft, tmp_path / "source"))
    (source / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(BadInput, match="link out of"):
        fetch(str(source), tmp_path / "out")


@needs_git_lfs
def test_a_bare_repository_may_be_named_by_its_path(repository: Path, files: dict[str, bytes], tmp_path: Path) -> None:
    fetch(str(repository), tmp_path / "out")
    assert same(tmp_path / "out", files)


# -- what is in the way ---------------------------------------------------------------------------------------------


def test_a_file_of_the_users_is_not_overwritten(draft: Path, files: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("mine")
    with pytest.raises(BadInput, match="in the way"):
        fetch(str(draft), out)
    assert (out / "config.json").read_text() == "mine"
    fetch(str(draft), out, repull=True)
    assert same(out, files)


def test_a_link_in_place_of_a_folder_is_not_written_through(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "a.txt").write_text("a")
    out.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (out / "sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match="in the way"):
        fetch(str(source), out, repull=True)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_second_fetch_into_the_directory_is_refused_while_one_runs(draft: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with locked(out), pytest.raises(BadInput, match=f"process {os.getpid()} holds its lock"):
        fetch(str(draft), out)
    fetch(str(draft), out)


def test_too_little_space_is_said_before_anything_is_downloaded(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k3dspark.checkpoint.space.MARGIN_BYTES", 1 << 60)
    with pytest.raises(EngineFault, match="not enough free space"):
        fetch(str(draft), tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


def test_repull_of_an_unknown_directory_asks_for_the_source(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not known"):
        fetch(None, tmp_path, repull=True)
    with pytest.raises(BadInput, match="to complete"):
        fetch(None, tmp_path / "nowhere", repull=True)


# -- names of sources, paths of listings ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nowhere",
        "modelscope:",
        "modelscope:name",
        "hf:../../etc",
        "hf:a/b/c",
        "git:",
        "git:--upload-pack=touch x",
        "git:ext::sh -c true",
        "git:/absolute/path",
        "ftp://example.org/x.git",
        "https://example.org/x",
        "\0",
    ],
)
def test_what_is_no_source_is_bad_input(text: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        fetch(text, tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("git:https://user:secret@example.org/a/b.git", "git:https://example.org/a/b.git"),
        ("https://example.org/a/b.git", "git:https://example.org/a/b.git"),
        ("git:git@example.org:a/b", "git:git@example.org:a/b"),
        ("file:///a/b", "git:file:///a/b"),
        ("modelscope:Eco-Tech/Kimi-K3-DSpark-MLA-NPU", "modelscope:Eco-Tech/Kimi-K3-DSpark-MLA-NPU"),
    ],
)
def test_a_source_is_recorded_without_its_credentials(text: str, name: str) -> None:
    assert parse_source(text).name == name


@pytest.mark.parametrize(
    "paths",
    [
        ["../a"],
        ["/a"],
        ["a/../b"],
        ["a//b"],
        ["./a"],
        [".git/config"],
        ["a/.GIT/config"],
        [".k3dspark/manifest.json"],
        ["a\nb"],
        ["C:/x"],
        ["con."],
        ["a", "A"],
        ["a", "a/b"],
        ["x" * 2000],
        ["/".join("a" * 40)],
        [""],
        [],
    ],
)
def test_listings_that_no_directory_can_hold_safely_are_refused(paths: list[str]) -> None:
    with pytest.raises(BadInput):
        require_safe(Listing("", tuple(RemoteFile(path, 1, "hub") for path in paths)), "source")


@pytest.mark.parametrize("path", ["model.safetensors", "a/b/c.json", ".gitattributes", "模型.json", "a b.txt"])
def test_ordinary_paths_are_plain(path: str) -> None:
    assert is_plain_path(path)


def test_the_command_prints_json(draft: Path, tmp_path: Path) -> None:
    process = k3dspark("fetch", str(draft), "--to", str(tmp_path / "out"), "--json")
    out, _ = process.communicate()
    assert process.returncode == 0
    report = json.loads(out)
    assert report["format"] == 1
    assert {file["path"] for file in report["files"]} == {path.name for path in draft.iterdir()}
