"""One API request in the engine: all its choices, their pieces as they come, and its statistics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from time import perf_counter
from typing import Any

from k3dspark.decoding import DecodeStats, FinishReason, SamplingParams
from k3dspark.decoding.params import SEEDS
from k3dspark.serving.answer import Answer, Piece
from k3dspark.serving.errors import fault, invalid
from k3dspark.serving.tokens import Tokens
from k3dspark.serving.worker import Event, Job, Worker

Namer = Callable[[int], str]


def numbered(token_id: int) -> str:
    """A token's name for clients that want its id, as vLLM writes it."""
    return f"token_id:{token_id}"


class Generation:
    """Submits `choices` jobs for every prompt; choice i of a prompt uses seed + i, so choice 0 is what n=1 would give.

    `cancel` ends what is still running; call it however the request ends.
    """

    def __init__(
        self,
        worker: Worker,
        tokens: Tokens,
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams,
        choices: int,
        echoes: Sequence[str] = (),
        *,
        token_ids: bool = False,
        number_tokens: bool = False,
    ) -> None:
        self._worker = worker
        self._choices = choices
        self._token_ids = token_ids
        self.namer: Namer = numbered if number_tokens else tokens.name
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.started = perf_counter()
        self.prompt_tokens = sum(len(prompt) for prompt in prompts)
        self.jobs: list[Job] = []
        self.answers: list[Answer] = []
        for number, prompt in enumerate(prompts):
            for choice in range(choices):
                seed = None if params.seed is None else (params.seed + choice) % SEEDS
                self.jobs.append(Job(len(self.jobs), prompt, replace(params, seed=seed), self._events))
                self.answers.append(Answer(tokens.text, params, echoes[number] if echoes else ""))
        for job in self.jobs:
            worker.submit(job)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(choice, piece) in the order they come. Raises `ApiError` when the engine failed."""
        open_choices = len(self.jobs)
        while open_choices:
            index, event = await self._events.get()
            if event.reason is FinishReason.ERROR:
                raise fault(event.error)
            if event.reason is FinishReason.CANCELLED:  # not by us: the engine is being stopped
                raise fault(None)
            open_choices -= event.reason is not None
            piece = self.answers[index].push(event)
            if piece:
                yield index, piece

    async def finish(self) -> None:
        """Wait for all answers."""
        async for _ in self.pieces():
            pass

    def cancel(self) -> None:
        for job in self.jobs:
            self._worker.cancel(job)

    @property
    def completion_tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    def ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """What a choice says of its ids, named as vLLM names them; nothing unless the client asked."""
        return {"token_ids": list(token_ids)} if self._token_ids else {}

    def prompt_ids(self, index: int) -> dict[str, Any]:
        """The same for the prompt of a choice."""
        return {"prompt_token_ids": list(self.jobs[index].prompt_ids)} if self._token_ids else {}

    def usage(self) -> dict[str, Any]:
        # Counted once for each prompt, as its tokens are: choices after the first one find it there.
        cached = sum(job.stats.cached_tokens for job in self.jobs[:: self._choices])
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def metrics(self) -> dict[str, Any]:
        """The extra field `metrics` of a response: times in seconds, and speculation pooled over all choices."""
        stats: DecodeStats = reduce(add, (job.stats for job in self.jobs))
        firsts = [job.first_token - job.arrived for job in self.jobs if job.first_token is not None]
        queued = [job.started - job.arrived for job in self.jobs if job.started is not None]
        return {
            "time_to_first_token_seconds": min(firsts) if firsts else None,
            "queue_seconds": max(queued) if queued else None,
            "seconds": perf_counter() - self.started,
            "speculative_decoding": {
                "rounds": stats.rounds,
                "draft_tokens": stats.drafted,
                "accepted_tokens": stats.accepted,
                "mean_acceptance_length": stats.acceptance_length,
                "draft_acceptance_rate": stats.acceptance_rate,
                "accepted_per_slot": list(stats.accepted_by_slot),
                "draft_seconds": stats.draft_seconds,
                "verify_seconds": stats.verify_seconds,
                "host_seconds": stats.host_seconds,
            },
        }


def check_choices(prompts: int, n: int, most: int) -> None:
    if prompts * n > most:
        raise invalid(f"{prompts} prompts with n={n} make {prompts * n} answers; this server gives up to {most}", "n")
