"""Long work shown: a bar on a terminal, a plain line every few seconds elsewhere. Always on standard error."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

LINE_SECONDS = 5.0


class _Bar:
    """A bar that stands while the context lasts, on a terminal; elsewhere there is none."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._last_line = 0.0

    def _columns(self) -> list[Any]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._last_line = time.monotonic()
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                *self._columns(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


class Bytes(_Bar):
    """Progress in bytes through named stages; use it as a context manager."""

    def __init__(self) -> None:
        super().__init__()
        self._stage = ""

    def _columns(self) -> list[Any]:
        from rich.progress import DownloadColumn, TransferSpeedColumn

        return [DownloadColumn(), TransferSpeedColumn()]

    def update(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` bytes of a stage; a new stage begins a new bar."""
        if self._bar is not None:
            if stage != self._stage:
                if self._task is not None:
                    self._bar.remove_task(self._task)
                self._task = self._bar.add_task(stage, total=total)
            self._bar.update(self._task, completed=done, total=total)
        elif done == total or time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            print(f"{stage}: {done:,} of {total:,} bytes", file=sys.stderr, flush=True)
        self._stage = stage


class Count(_Bar):
    """Progress through a known number of things; use it as a context manager and call `add` after each."""

    def __init__(self, what: str, total: int) -> None:
        super().__init__()
        self.what, self.total, self.done = what, total, 0
        self._started = 0.0

    def _columns(self) -> list[Any]:
        from rich.progress import MofNCompleteColumn

        return [MofNCompleteColumn()]

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        super().__enter__()
        if self._bar is not None:
            self._task = self._bar.add_task(self.what, total=self.total)
        return self

    def add(self) -> None:
        """One more is done."""
        self.done += 1
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)
        elif now - self._last_line >= LINE_SECONDS or self.done == self.total:
            left = (now - self._started) / self.done * (self.total - self.done)
            print(f"{self.done} of {self.total} {self.what}, {left:.0f} s left", file=sys.stderr, flush=True)
            self._last_line = now

    def reach(self, done: int, total: int) -> None:
        """So many are done, of so many: for work whose size is known only once it has begun."""
        self.done, self.total = done - 1, total
        if self._bar is not None:
            self._bar.update(self._task, total=total)
        self.add()
