"""Plain and speculative decoding of one prompt, taking turns, so that a noisy machine is noisy to both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from k3dspark.decoding.engine import Engine, Stream
from k3dspark.decoding.params import SamplingParams
from k3dspark.decoding.request import Result

WARM_UP_TOKENS = 16  # first calls allocate and choose kernels; they are run and forgotten


@dataclass(frozen=True)
class Comparison:
    """The same prompt decoded with the draft and without it."""

    speculative: Result
    plain: Result

    @property
    def identical(self) -> bool:
        """Whether the two have the same tokens: what losslessness means for greedy decoding."""
        return self.speculative.token_ids == self.plain.token_ids

    @property
    def first_difference(self) -> int | None:
        """Index of the first new token that differs (or that only one of them has); None when identical."""
        if self.identical:
            return None
        pairs = zip(self.speculative.token_ids, self.plain.token_ids, strict=False)
        shorter = min(len(self.speculative.token_ids), len(self.plain.token_ids))
        return next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)

    @property
    def speedup(self) -> float:
        """Tokens per second with the draft over those without; prefill is in neither. 0.0 when nothing was timed."""
        plain = self.plain.stats.tokens_per_second
        return self.speculative.stats.tokens_per_second / plain if plain else 0.0


def compare(
    speculative: Engine,
    plain: Engine,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    on_tokens: Callable[[Sequence[int]], None] | None = None,
) -> Comparison:
    """Decode with both engines side by side: whichever has fewer tokens moves next.

    `on_tokens` gets the speculative engine's tokens as they are committed. Each request times its own rounds, so the
    other's turns are in neither figure.
    """
    short = replace(params, max_new_tokens=min(WARM_UP_TOKENS, params.max_new_tokens))
    _side_by_side(speculative, plain, prompt_ids, short)
    return _side_by_side(speculative, plain, prompt_ids, params, on_tokens)


def _side_by_side(
    speculative: Engine,
    plain: Engine,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    on_tokens: Callable[[Sequence[int]], None] | None = None,
) -> Comparison:
    with_draft = speculative.stream(prompt_ids, params)
    without = plain.stream(prompt_ids, params)
    running: list[Stream] = [with_draft, without]
    try:
        while running:
            behind = min(running, key=lambda stream: len(stream.request.new_ids))
            tokens = next(behind, None)
            if tokens is None:
                running.remove(behind)
            elif behind is with_draft and on_tokens is not None:
                on_tokens(tokens)
    finally:
        for stream in running:
            stream.close()
    return Comparison(with_draft.result, without.result)
