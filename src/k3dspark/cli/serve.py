"""`k3dspark serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from k3dspark.cli import options, sampling

if TYPE_CHECKING:
    from k3dspark.decoding import Scheduler
    from k3dspark.decoding.scheduler_for import Schedule
    from k3dspark.embedded.pair import ModelPair

_LIMITS = "Limits"
_DEFAULTS = "Sampling of requests that do not say"

log = logging.getLogger("k3dspark.serving")

MEASURED_REQUESTS = 16  # costs of larger batches are extrapolated


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    target: options.Target = None,
    draft: options.Draft = None,
    no_draft: options.NoDraft = False,
    model_name: Annotated[
        str | None, typer.Option("--model-name", help="The model's id in the API.", show_default="the directory's name")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="API keys, one a line; K3DSPARK_API_KEY adds one. None: open to all."),
    ] = None,
    log_format: Annotated[Literal["lines", "json"], typer.Option(help="Shape of the log on standard error.")] = "lines",
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts to the log.")] = False,
    schedule: options.ScheduleName = None,
    draft_length: options.DraftLength = None,
    threshold: options.Threshold = None,
    online_calibration: options.OnlineCalibration = False,
    costs: options.Costs = None,
    verify: Annotated[
        Literal["token", "block"],
        typer.Option(help="How draft tokens of sampled requests are verified.", rich_help_panel=options.SPECULATION),
    ] = "block",
    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help="A request's tokens never depend on its company.", rich_help_panel=options.SPECULATION
        ),
    ] = False,
    max_running: Annotated[
        int, typer.Option("--max-running", min=1, max=4096, help="Requests decoded at once.", rich_help_panel=_LIMITS)
    ] = 32,
    max_queue: Annotated[
        int, typer.Option("--max-queue", min=0, help="Requests that wait; more get 429.", rich_help_panel=_LIMITS)
    ] = 256,
    cache_rows: Annotated[
        int | None,
        typer.Option(
            "--cache-rows", min=1, help="Tokens in the cache, all requests together.", rich_help_panel=_LIMITS,
            show_default="no limit",
        ),
    ] = None,
    prefix_cache: Annotated[
        bool | None,
        typer.Option(
            "--prefix-cache/--no-prefix-cache", help="Keep rows for prompts that begin alike.",
            rich_help_panel=_LIMITS, show_default="where the target allows it",
        ),
    ] = None,
    prefix_rows: Annotated[
        int, typer.Option("--prefix-cache-rows", min=32, help="Tokens kept for that at most.", rich_help_panel=_LIMITS)
    ] = 16384,
    prefill_chunk: Annotated[
        int, typer.Option("--prefill-chunk", min=1, help="Prompt tokens between rounds.", rich_help_panel=_LIMITS)
    ] = 256,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest prompt.", show_default="the context", rich_help_panel=_LIMITS),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest answer that may be asked for.", show_default="the context",
                     rich_help_panel=_LIMITS),
    ] = None,
    max_choices: Annotated[
        int, typer.Option(min=1, help="Prompts times n of one request.", rich_help_panel=_LIMITS)
    ] = 16,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Largest body.", rich_help_panel=_LIMITS)] = 4_194_304,
    max_seconds: Annotated[
        float, typer.Option(min=0.1, help="Longest time of a request, waiting included.", rich_help_panel=_LIMITS)
    ] = 600.0,
    drain_seconds: Annotated[
        float, typer.Option(min=0.1, help="Longest wait for running requests after SIGTERM.", rich_help_panel=_LIMITS)
    ] = 120.0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_DEFAULTS)] = 1.0,
    top_p: Annotated[float, typer.Option(help="1 is off.", rich_help_panel=_DEFAULTS)] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off.", rich_help_panel=_DEFAULTS)] = 0,
    min_p: Annotated[float, typer.Option(help="0 is off.", rich_help_panel=_DEFAULTS)] = 0.0,
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
) -> None:  # fmt: skip
    """Serve a model and its draft over HTTP, as OpenAI does: /v1/completions, /v1/chat/completions, /dashboard.

    SIGTERM finishes what runs and refuses the rest; the exit status is then 0.
    """
    options.require_draft(target, draft, no_draft)
    sampling.check_costs(costs, schedule)
    options.refuse_without_draft(no_draft, schedule=schedule, draft_length=draft_length)
    plan = sampling.schedule(schedule, draft_length, threshold, online_calibration)

    from k3dspark.decoding import SamplingParams
    from k3dspark.serving.server import EngineSettings, build_service, set_up_logging
    from k3dspark.serving.server import serve as run
    from k3dspark.serving.settings import Defaults, Limits, Settings, read_keys
    from k3dspark.target.protocol import CopiesRows

    defaults = Defaults(temperature, top_p, top_k, min_p, verify)
    SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)  # refuse nonsense before loading
    settings = Settings(
        host=host,
        port=port,
        model_name=model_name,
        limits=Limits(
            body_bytes=max_body_bytes,
            prompt_tokens=max_prompt_tokens,
            new_tokens=max_new_tokens,
            choices=max_choices,
            queue=max_queue,
            request_seconds=max_seconds,
            drain_seconds=drain_seconds,
        ),
        defaults=defaults,
        api_keys=read_keys(api_key_file),
        log_format=log_format,
        log_prompts=log_prompts,
        running=max_running,
    )
    set_up_logging(settings)
    log.info("loading the models")
    pair = options.load(target, draft, no_draft, dtype, threads)
    log.info("loaded %s%s", pair.name, " and its draft" if pair.draft is not None else "")
    if prefix_cache is None:
        prefix_cache = isinstance(pair.target, CopiesRows)
    engine = EngineSettings(
        scheduler=_scheduler(plan, pair, draft, costs, exact, max_running),
        schedule=plan.kind,
        exact=exact,
        prefill_chunk=prefill_chunk,
        cache_rows=cache_rows,
        prefix_rows=prefix_rows if prefix_cache else None,
    )
    run(build_service(pair, engine, settings))


def _scheduler(
    plan: Schedule, pair: ModelPair, draft: Path | None, costs: Path | None, exact: bool, running: int
) -> Scheduler:
    from k3dspark.decoding import FullBlock
    from k3dspark.decoding.costs import measure
    from k3dspark.decoding.scheduler_for import STARTUP_REPEATS, scheduler_for

    if pair.draft is None:
        return FullBlock()
    if not plan.reads_confidence:
        return scheduler_for(plan, pair.target, pair.draft)
    table = sampling.step_costs(costs, pair, min(running, MEASURED_REQUESTS)) if costs is not None else None
    if plan.kind == "cost" and table is None:
        log.info("measuring step costs")
        table = measure(pair.target, pair.draft, min(running, MEASURED_REQUESTS), repeats=STARTUP_REPEATS)
    calibration = sampling.calibration(draft, pair.draft)
    return scheduler_for(plan, pair.target, pair.draft, calibration=calibration, costs=table, exact=exact)
