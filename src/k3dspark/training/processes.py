"""Running a stage in one process or several, with errors and interrupts that arrive as they should."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from k3dspark.errors import EngineFault, K3DSparkError

Worker = Callable[..., None]


def run_stage(worker: Worker, processes: int, rendezvous: Path, *arguments: Any) -> None:
    """Call worker(rank, *arguments) in this process, or in `processes` of them joined by torch.distributed (gloo).

    `arguments` must be picklable when there are several. A `K3DSparkError` of a worker is raised here; any other end
    of a worker is an `EngineFault`. Each worker has an equal share of the cores. Workers flush denormal numbers to
    zero (tiny Adam moments would slow every step); the caller's own process goes on as it was.
    """
    if processes == 1:
        torch.set_flush_denormal(True)
        try:
            worker(0, *arguments)
        finally:
            torch.set_flush_denormal(False)
        return
    rendezvous.unlink(missing_ok=True)
    errors: SimpleQueue[tuple[type[K3DSparkError], str, str, str]] = get_context("spawn").SimpleQueue()
    try:
        # Daemons: an interrupt of this process ends them too.
        start_processes(
            _work, (worker, processes, rendezvous, errors, arguments), processes, daemon=True, start_method="spawn"
        )
    except ProcessExitedException as ended:
        if not errors.empty():
            kind, what, why, remedy = errors.get()
            raise kind(what, why, remedy) from ended
        raise EngineFault(
            "a training process ended early",
            f"it exited with {ended.exit_code}; a process killed for memory looks like this",
            "look at the lines above, then give the same command again: it resumes",
        ) from ended
    finally:
        rendezvous.unlink(missing_ok=True)


def _work(
    rank: int,
    worker: Worker,
    processes: int,
    rendezvous: Path,
    errors: SimpleQueue[tuple[type[K3DSparkError], str, str, str]],
    arguments: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent reports the interrupt, once
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(max((os.cpu_count() or 1) // processes, 1))
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous.absolute()}", rank=rank, world_size=processes)
    try:
        worker(rank, *arguments)
        dist.destroy_process_group()
    except K3DSparkError as error:
        errors.put((type(error), error.what, error.why, error.remedy))
        sys.exit(error.exit_status)


def _end_with_parent() -> None:
    """A killed parent takes its workers along: one left behind would write over the run that takes its place."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
