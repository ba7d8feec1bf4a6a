"""The thread that owns the engine: it takes jobs in, steps, and hands tokens back to the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import perf_counter

from k3dspark.decoding import DecodeStats, Engine, FinishReason, Progress, Request, SamplingParams, TokenLogprob
from k3dspark.errors import EngineFault, K3DSparkError
from k3dspark.serving.metrics import Metrics
from k3dspark.serving.watch import Watched, WatchedScheduler

log = logging.getLogger("k3dspark.serving")


@dataclass(frozen=True)
class Event:
    """New tokens of a job; the last one has a `reason` (and an `error` when that is why)."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    reason: FinishReason | None = None
    error: K3DSparkError | None = None


@dataclass(eq=False)
class Job:
    """One choice of an answer, from its arrival to its last event. `stats` is complete with that event."""

    index: int  # of the choice
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    events: asyncio.Queue[tuple[int, Event]]  # shared by the choices of one answer
    arrived: float = field(default_factory=perf_counter)
    request: Request | None = None
    started: float | None = None
    first_token: float | None = None
    last_token: float = 0.0
    preemptions: int = 0

    @property
    def stats(self) -> DecodeStats:
        return self.request.stats if self.request is not None else DecodeStats()


class Worker:
    """Runs one engine. `submit` and `cancel` belong to the event loop's thread; the rest happens in the worker's.

    `jobs` are those whose last event is still to come. A step that raises ends every job with that error, and the
    engine goes on with new ones.
    """

    def __init__(self, engine: Engine, scheduler: WatchedScheduler, metrics: Metrics, rows_allowed: int) -> None:
        self.engine = engine
        self.jobs: set[Job] = set()
        self._scheduler, self._metrics, self._rows_allowed = scheduler, metrics, rows_allowed
        self._of_request: dict[Request, Job] = {}
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._outbox: list[tuple[Job, Event]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="k3dspark-engine", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._metrics.up.set(1)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step it is in; running jobs are cancelled."""

        def end() -> None:
            self._stopping = True

        self._inbox.put(end)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def submit(self, job: Job) -> None:
        self.jobs.add(job)
        self._inbox.put(lambda: self._begin(job))

    def cancel(self, job: Job) -> None:
        """End a job and free what it holds before the next step; nothing happens to a finished one."""
        if job in self.jobs:
            self._inbox.put(lambda: self._cancel(job))

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._receive()
                if not self.engine.idle and not self._stopping:
                    self._step()
                self._hand_over()
        finally:
            for job in list(self._of_request.values()):
                self._cancel(job)
            self._hand_over()
            self._metrics.up.set(0)

    def _receive(self) -> None:
        """Everything that has arrived; waits for something when there is nothing else to do."""
        if self.engine.idle:
            self._gauges()
            self._inbox.get()()
        while not self._inbox.empty() and not self._stopping:
            self._inbox.get()()

    def _begin(self, job: Job) -> None:
        try:
            job.request = self.engine.submit(job.prompt_ids, job.params)
        except K3DSparkError as error:
            self._outbox.append((job, Event(reason=FinishReason.ERROR, error=error)))
            return
        self._of_request[job.request] = job

    def _cancel(self, job: Job) -> None:
        if job.request is not None and not job.request.finished:
            self.engine.cancel(job.request)
            self._end(job, FinishReason.CANCELLED, None)

    def _step(self) -> None:
        started = perf_counter()
        in_prefill = {r: r.stats.prefill_seconds for r in self.engine.waiting}
        try:
            progress = self.engine.step()
        except Exception as error:  # whatever it is, every client must hear of it
            log.exception("the engine's step failed")
            self._fail(error)
            return
        now = perf_counter()
        self._begun(started)
        watched = self._scheduler.take()
        prefill = max((r.stats.prefill_seconds - before for r, before in in_prefill.items()), default=0.0)
        self._times(watched, prefill, now - started)
        self._metrics.batch.observe(sum(len(p.new_ids) for p in progress))
        self._rounds(watched, progress)
        for part in progress:
            self._report(part, now)
        self._gauges()

    def _times(self, watched: Watched | None, prefill: float, whole: float) -> None:
        """Share out a step's seconds; what is neither prefill nor a pass of a model is the host's."""
        draft = watched.outcome.draft_seconds if watched is not None else 0.0
        verify = watched.outcome.verify_seconds if watched is not None else 0.0
        host = whole - prefill - draft - verify
        for name, seconds in (("draft", draft), ("verify", verify), ("prefill", prefill), ("host", host)):
            self._metrics.phase(name, seconds)
        self._metrics.busy.inc(whole)

    def _begun(self, now: float) -> None:
        """Note who entered prefill in this step, and who stepped back."""
        for request, job in self._of_request.items():
            if job.started is None and (request.handle is not None or request.new_ids):
                job.started = now
                self._metrics.queue_time.observe(now - job.arrived)
            if request.preemptions > job.preemptions:
                self._metrics.preemptions.inc(request.preemptions - job.preemptions)
                job.preemptions = request.preemptions

    def _rounds(self, watched: Watched | None, progress: Sequence[Progress]) -> None:
        if watched is None:
            return
        kept = {p.request.id: len(p.new_ids) for p in progress}
        load = watched.outcome.load
        for row, (request, verified) in enumerate(zip(load.requests, watched.outcome.verified, strict=True)):
            if kept.get(request):
                # As the request itself counts: what a stop or the limit cut off was not accepted.
                self._metrics.round(verified, kept[request] - 1, watched.survival[row])

    def _report(self, part: Progress, now: float) -> None:
        job = self._of_request.get(part.request)
        if job is None:
            return
        count = len(part.new_ids)
        if count:
            self._metrics.generation_tokens.inc(count)
            if job.first_token is None:
                job.first_token = now
                self._metrics.first_token.observe(now - job.arrived)
                self._metrics.prompt_tokens.inc(len(job.prompt_ids))
                self._metrics.prefill_time.observe(now - (job.started or job.arrived))
            else:
                for _ in range(count):
                    self._metrics.between_tokens.observe((now - job.last_token) / count)
            job.last_token = now
        request = part.request
        if request.finish_reason is not None:
            self._end(job, request.finish_reason, request.error, part.new_ids)
        elif count:
            self._outbox.append((job, Event(part.new_ids, self._logprobs(request, count))))

    def _end(
        self, job: Job, reason: FinishReason, error: K3DSparkError | None, token_ids: tuple[int, ...] = ()
    ) -> None:
        assert job.request is not None
        del self._of_request[job.request]
        self._metrics.finished(reason, job.stats, job.arrived, job.first_token, perf_counter())
        self._outbox.append((job, Event(token_ids, self._logprobs(job.request, len(token_ids)), reason, error)))

    def _logprobs(self, request: Request, count: int) -> tuple[TokenLogprob, ...]:
        return tuple(request.logprobs[-count:]) if count and request.params.logprobs is not None else ()

    def _fail(self, error: Exception) -> None:
        """After a failed step nothing about the batch can be trusted: all of it ends, and its memory is freed."""
        self._metrics.faults.inc()
        told = (
            error
            if isinstance(error, K3DSparkError)
            else EngineFault("the engine failed", type(error).__name__, "read the server's log")
        )
        self.engine.abort(told)
        for job in list(self._of_request.values()):
            self._end(job, FinishReason.ERROR, told)

    def _gauges(self) -> None:
        rows = self.engine.rows
        self._metrics.running.set(len(self.engine.running))
        self._metrics.waiting.set(len(self.engine.waiting))
        self._metrics.cache_rows.set(rows)
        self._metrics.cache_use.set(rows / self._rows_allowed)
        if self.engine.prefix is not None:
            self._metrics.prefix(self.engine.prefix.rows, self.engine.prefix.queried, self.engine.prefix.hit)

    def _hand_over(self) -> None:
        """All events since the last time, in one call of the event loop."""
        if self._outbox and self._loop is not None:
            events, self._outbox = self._outbox, []
            try:
                self._loop.call_soon_threadsafe(self._deliver, events)
            except RuntimeError:  # the loop is closed: nobody is left to tell
                self._stopping = True

    def _deliver(self, events: Sequence[tuple[Job, Event]]) -> None:
        for job, event in events:
            if event.reason is not None:
                self.jobs.discard(job)
            job.events.put_nowait((job.index, event))
