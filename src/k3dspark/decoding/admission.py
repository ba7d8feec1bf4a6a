"""Who may hold cache rows: how many requests run at once, and who steps back when their rows no longer fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from k3dspark.decoding.request import Request
from k3dspark.errors import BadInput


@dataclass(frozen=True)
class Capacity:
    """Most requests that are prefilled or decoded at once, and most target rows they hold together; None: no limit.

    Requests are served in the order they came. When the rows run out, the youngest steps back: its target rows are
    freed, and later made again from its prompt and its committed tokens. It keeps the draft's context rows, which are
    few bytes beside the target's and spare it any doubt that the draft would propose the same block again.
    """

    running: int | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        for name in ("running", "rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInput(f"the limit on {name} is {value}", "nothing could ever run", "pass 1 or more")

    def check(self, prompt_tokens: int, new_tokens: int) -> None:
        """Raise `BadInput` for a request that would not fit even alone."""
        most = prompt_tokens + new_tokens - 1  # the last token is never an input
        if self.rows is not None and most > self.rows:
            raise BadInput(
                f"the request needs {most} cache rows",
                f"all requests together may hold {self.rows}",
                "shorten the prompt or ask for fewer new tokens",
            )

    def admit(self, waiting: Sequence[Request], running: Sequence[Request], block: int) -> list[Request]:
        """Those of `waiting` that may be prefilled now: who has begun already, then the oldest as long as they fit."""
        begun = [r for r in waiting if r.handle is not None]
        held = needed_by([*running, *begun], block)
        places = len(running) + len(begun)
        admitted = []
        full = False  # nobody overtakes: a large prompt would never get its turn
        for request in waiting:
            if request.handle is not None:
                admitted.append(request)
                continue
            needed = rows_needed(request, block)
            full = full or (self.running is not None and places >= self.running)
            full = full or (self.rows is not None and held + needed > self.rows and places > 0)
            if not full:
                admitted.append(request)
                held += needed
                places += 1
        return admitted

    def surplus(self, waiting: Sequence[Request], running: Sequence[Request], block: int) -> list[Request]:
        """The youngest requests that must give up their rows before the next round; never the oldest of all."""
        if self.rows is None:
            return []
        holders = sorted((r for r in (*waiting, *running) if r.handle is not None), key=lambda r: r.id)
        held = needed_by(holders, block)
        given_up = []
        while held > self.rows and len(holders) > 1:
            youngest = holders.pop()
            held -= rows_needed(youngest, block)
            given_up.append(youngest)
        return given_up

    def spare(self, holders: Sequence[Request], block: int) -> int | None:
        """Rows that `holders` leave free in their next round; None: no limit."""
        return None if self.rows is None else max(self.rows - needed_by(holders, block), 0)


def needed_by(requests: Sequence[Request], block: int) -> int:
    """The sum of `rows_needed`."""
    return sum(rows_needed(request, block) for request in requests)


def rows_needed(request: Request, block: int) -> int:
    """Target rows that a request holds at the widest point of its next round, which verifies `block` draft tokens."""
    return request.fill_length + min(block + 1, request.remaining)
