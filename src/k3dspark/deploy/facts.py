"""`gather`: everything the checklist judges, read once from this node, the two directories and the other nodes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from k3dspark.checkpoint.inspection import Inspection, inspect_checkpoint
from k3dspark.deploy.accelerators import CudaFacts, DeviceKind, NpuFacts, read_gpus, read_npus
from k3dspark.deploy.host import (
    Disk,
    HostName,
    Port,
    Processor,
    read_disk,
    read_host_name,
    read_ports,
    read_processor,
)
from k3dspark.deploy.nodes import Node, read_nodes
from k3dspark.deploy.python_env import PythonFacts, read_python
from k3dspark.deploy.target_files import TargetFiles, read_target
from k3dspark.deploy.versions import AscendVersions, read_ascend_versions
from k3dspark.errors import BadInput


@dataclass(frozen=True)
class Request:
    """What the user wants checked. `python` is the program whose environment serves, None for this one."""

    draft: Path
    target: Path | None = None
    device: DeviceKind = "cpu"
    nodes: tuple[str, ...] = ()
    ports: tuple[int, ...] = (8000,)
    python: str | None = None
    root: Path = Path("/")
    timeout_seconds: float = 20.0
    verify: bool = False


@dataclass(frozen=True)
class Facts:
    """Plain data; `checklist.judge` turns it into items without looking anywhere else."""

    device: DeviceKind
    draft: Inspection
    target: TargetFiles | None
    target_problem: BadInput | None
    target_given: bool
    processor: Processor
    host: HostName
    disk: Disk
    shared_memory: Disk | None
    ports: tuple[Port, ...]
    python: PythonFacts
    npus: NpuFacts | None = None
    cuda: CudaFacts | None = None
    ascend: AscendVersions = field(default_factory=AscendVersions)
    nodes: tuple[Node, ...] = ()


def gather(request: Request) -> Facts:
    """Read it all. Raises `BadInput` when there is no draft to inspect or the target is no directory."""
    target, problem = None, None
    if request.target is not None:
        if not request.target.is_dir():
            raise BadInput(
                f"{request.target} is not a directory", "the target is a directory with config.json", "check --target"
            )
        try:
            target = read_target(request.target)
        except BadInput as error:
            problem = error
    # A target without a readable config cannot be compared with; the draft still can be inspected.
    draft = inspect_checkpoint(request.draft, request.target if target is not None else None, request.verify)
    npu = request.device == "npu"
    shared = request.root / "dev/shm"
    return Facts(
        device=request.device,
        draft=draft,
        target=target,
        target_problem=problem,
        target_given=request.target is not None,
        processor=read_processor(request.root),
        host=read_host_name(),
        disk=read_disk(request.draft),
        shared_memory=read_disk(shared) if shared.is_dir() else None,
        ports=read_ports(request.ports),
        python=read_python(request.python, request.timeout_seconds),
        npus=read_npus(request.timeout_seconds) if npu else None,
        cuda=read_gpus(request.timeout_seconds) if request.device == "cuda" else None,
        ascend=read_ascend_versions(request.root, os.environ) if npu else AscendVersions(),
        nodes=read_nodes(request.nodes, request.ports, request.timeout_seconds) if request.nodes else (),
    )


def guess_device(timeout_seconds: float = 20.0) -> DeviceKind:
    """The accelerator whose tool lists a device here, else the CPU."""
    if read_npus(timeout_seconds).info.chips:
        return "npu"
    return "cuda" if read_gpus(timeout_seconds).gpus else "cpu"
