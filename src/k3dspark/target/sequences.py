"""The open sequences of a target: handles that are never used twice, each with the state that the target keeps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Generic, TypeVar

from k3dspark.errors import EngineFault

State = TypeVar("State")


class Sequences(Generic[State]):
    """States by handle. A handle that is not open is an `EngineFault`."""

    def __init__(self) -> None:
        self._states: dict[int, State] = {}
        self._handles = count()

    def open(self, state: State) -> int:
        """A new handle for a state."""
        handle = next(self._handles)
        self._states[handle] = state
        return handle

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, handle: int) -> State:
        try:
            return self._states[handle]
        except KeyError:
            raise EngineFault(
                f"sequence {handle} is not open", "it was closed or never opened", "report this bug"
            ) from None

    def close(self, handle: int) -> None:
        """Forget a sequence."""
        self[handle]
        del self._states[handle]

    def items(self) -> Iterator[tuple[int, State]]:
        """All open handles with their states."""
        return iter(self._states.items())
