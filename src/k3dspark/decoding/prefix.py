"""Rows of prompts that come again: the target's and, beside them, the draft's context rows (spec A.3)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from torch import Tensor

from k3dspark.decoding.request import Request
from k3dspark.errors import BadInput
from k3dspark.target.protocol import CopiesRows, State, Target

BLOCK = 32  # tokens that are kept or dropped together

Key = tuple[int | str, tuple[int, ...]]  # id of the block before (of the first: the salt) and the block's own tokens


@dataclass(frozen=True, eq=False)
class Block:
    """Rows of `BLOCK` tokens after one certain prefix; `context` [L, BLOCK, W] is None without a draft.

    Both or neither: a target row without its context row would cost acceptance that nobody could explain.
    """

    id: int
    state: State
    context: Tensor | None


class PrefixCache:
    """Blocks by the tokens they hold and all tokens before them; the least recently used are dropped first.

    Tokens are compared themselves, not by a hash, so a hit is always the right one. Rows are copied in and out: what a
    request does to its own cannot reach them. `queried` and `hit` count tokens, as vLLM's metrics do.
    """

    def __init__(self, target: CopiesRows, limit: int) -> None:
        self._target = target
        self._limit = limit
        self._ids = count()
        self._blocks: OrderedDict[Key, Block] = OrderedDict()
        self.queried = 0
        self.hit = 0

    @property
    def rows(self) -> int:
        """Tokens held."""
        return BLOCK * len(self._blocks)

    def match(self, ids: Sequence[int], salt: str = "") -> list[Block]:
        """The longest chain of blocks under this salt that begins `ids`; one token is left to run, for its logits."""
        found: list[tuple[Key, Block]] = []
        for tokens in _blocks(ids[:-1]):
            key: Key = (found[-1][1].id if found else salt, tokens)
            block = self._blocks.get(key)
            if block is None:
                break
            found.append((key, block))
        self._touch([key for key, _ in found])
        return [block for _, block in found]

    def restore(self, request: Request, blocks: Sequence[Block]) -> None:
        """Put matched blocks at the beginning of a request that has just been opened."""
        assert request.handle is not None
        for block in blocks:
            self._target.paste_rows(request.handle, block.state)
            request.prefilled += BLOCK
            # One that stepped back still has context rows, and those of its new tokens may be about to be made.
            missing = request.prefilled - request.context.length if request.context is not None else 0
            if request.context is not None and block.context is not None and missing > 0 and not request.new_ids:
                request.context.append(block.context[:, BLOCK - missing :])
        if not request.preemptions:
            self.queried += len(request.prompt_ids)
            self.hit += request.prefilled
            request.stats.cached_tokens = request.prefilled

    def store(self, request: Request, room: int | None) -> None:
        """Keep the rows that a request holds, as whole blocks, as far as `room` and the limit have place for them."""
        if request.handle is None:
            return
        held = self._target.length(request.handle)
        if request.context is not None:
            held = min(held, request.context.length)
        most = self._limit if room is None else min(room, self._limit)
        keys: list[Key] = []
        parent: int | str = request.params.cache_salt
        for index, tokens in enumerate(_blocks([*request.prompt_ids, *request.new_ids][: min(held, most)])):
            keys.append((parent, tokens))
            if keys[-1] not in self._blocks:
                start = index * BLOCK
                context = request.context.rows(start, start + BLOCK) if request.context is not None else None
                state = self._target.copy_rows(request.handle, start, BLOCK)
                self._blocks[keys[-1]] = Block(next(self._ids), state, context)
            parent = self._blocks[keys[-1]].id
        self._touch(keys)
        self.shrink(most)

    def shrink(self, room: int | None) -> None:
        """Drop blocks until no more than `room` tokens are held."""
        while room is not None and self._blocks and self.rows > room:
            self._blocks.popitem(last=False)

    def _touch(self, keys: Sequence[Key]) -> None:
        # The first block last: a block is then never older than one behind it, and what is dropped has none behind it.
        for key in reversed(keys):
            self._blocks.move_to_end(key)


def prefix_cache(target: Target, limit: int) -> PrefixCache:
    """A cache of up to `limit` tokens for this target. Raises `BadInput` when its rows cannot be copied."""
    if limit < BLOCK:
        raise BadInput(
            f"a prefix cache of {limit} tokens", f"a block alone has {BLOCK}", f"pass {BLOCK} or more, or switch it off"
        )
    if not isinstance(target, CopiesRows):
        raise BadInput(
            f"no prefix reuse with a {type(target).__name__}",
            "the state of this target cannot be copied row by row",
            "leave the prefix cache off for it",
        )
    return PrefixCache(target, limit)


def _blocks(ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The whole blocks of `ids`."""
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        yield tuple(ids[end - BLOCK : end])
