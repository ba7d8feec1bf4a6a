"""What each engine calls what: one table from its names to ours.

Sources: vLLM `vllm/v1/spec_decode/metrics.py` and `vllm/v1/metrics`, SGLang's scheduler metrics, TokenSpeed's engine
metrics, docs/serve.md for our own. Older names follow newer ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Names = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Dialect:
    """One engine's names, without its prefix.

    `ranks`: the labels that tell data-parallel ranks apart; their values add up.
    `copies`: labels of ranks that repeat the same value (tensor, pipeline and expert ranks): one of them is taken.
    `between_tokens`: what one observation of the time between tokens covers: a round's whole step, or one token.
    `wanted`: what a healthy deployment with a draft has; what of it is absent is reported as missing.
    """

    name: str
    prefix: str
    ranks: tuple[str, ...]
    counters: Names
    gauges: Names
    histograms: Names
    wanted: tuple[str, ...]
    between_tokens: Literal["round", "token"]
    copies: tuple[str, ...] = ()
    # Counters of accepted and of verified draft tokens with the label `position`, from 0.
    accepted_per_slot: str = ""
    drafted_per_slot: str = ""


_TIMES: Final[Names] = {
    "first_token": ("time_to_first_token_seconds",),
    "between_tokens": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "per_token": ("request_time_per_output_token_seconds",),
    "end_to_end": ("e2e_request_latency_seconds",),
    "queue": ("request_queue_time_seconds",),
    "prompt_length": ("request_prompt_tokens",),
}
_SPECULATION: Final[Names] = {
    "rounds": ("spec_decode_num_drafts",),
    "drafted": ("spec_decode_num_draft_tokens",),
    "accepted": ("spec_decode_num_accepted_tokens",),
}
_TOKENS: Final[Names] = {"generated": ("generation_tokens",), "prompt": ("prompt_tokens",)}
_LOAD: Final[Names] = {
    "running": ("num_requests_running",),
    "waiting": ("num_requests_waiting",),
    "cache_usage": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
}
_PER_SLOT: Final = "spec_decode_num_accepted_tokens_per_pos"

VLLM: Final = Dialect(
    name="vLLM",
    prefix="vllm:",
    ranks=("engine",),
    counters={
        **_SPECULATION,
        **_TOKENS,
        "preemptions": ("num_preemptions",),
        "cache_queries": ("prefix_cache_queries", "gpu_prefix_cache_queries"),
        "cache_hits": ("prefix_cache_hits", "gpu_prefix_cache_hits"),
    },
    gauges=_LOAD,
    histograms=_TIMES,
    wanted=("rounds", "drafted", "accepted", "accepted_per_slot", "generated", "running", "waiting", "between_tokens"),
    # One observation for each step that brought tokens: with speculation that is a round, not a token.
    between_tokens="round",
    accepted_per_slot=_PER_SLOT,
)
OURS: Final = Dialect(
    name="k3dspark",
    prefix="k3dspark:",
    ranks=("engine",),
    counters={
        # Rounds that verified nothing count too: they cost a step of the target.
        **_SPECULATION,
        "rounds": ("spec_decode_num_rounds", "spec_decode_num_drafts"),
        **_TOKENS,
        "preemptions": ("num_preemptions",),
        "cache_queries": ("prefix_cache_queries",),
        "cache_hits": ("prefix_cache_hits",),
        "faults": ("engine_faults",),
    },
    gauges={**_LOAD, "block": ("spec_decode_block_size",)},
    histograms=_TIMES,
    wanted=("rounds", "drafted", "accepted", "accepted_per_slot", "generated", "running", "waiting", "between_tokens"),
    between_tokens="token",
    accepted_per_slot=_PER_SLOT,
    drafted_per_slot="spec_decode_num_draft_tokens_per_pos",
)
SGLANG: Final = Dialect(
    name="SGLang",
    prefix="sglang:",
    ranks=("dp_rank",),
    copies=("tp_rank", "pp_rank", "moe_ep_rank"),
    counters={**_TOKENS, "cache_hits": ("cached_tokens",)},
    gauges={
        "running": ("num_running_reqs",),
        "waiting": ("num_queue_reqs",),
        "cache_usage": ("token_usage",),
        "hit_ratio": ("cache_hit_rate",),
        "tokens_per_second": ("gen_throughput",),
        # Of the last reporting window, the bonus token counted; 0 where there is no speculation.
        "length": ("spec_accept_length",),
        "rate": ("spec_accept_rate",),
        # The verify width: the anchor and the proposals.
        "width": ("spec_num_draft_tokens",),
    },
    histograms={
        **_TIMES,
        "between_tokens": (
            "inter_token_latency_seconds",
            "inter_tokens_latency_seconds",
            "time_per_output_token_seconds",
        ),
        "queue": ("queue_time_seconds",),
        "prompt_length": ("prompt_tokens_histogram",),
    },
    wanted=("length", "width", "generated", "running", "waiting", "between_tokens"),
    between_tokens="token",
)
TOKENSPEED: Final = Dialect(
    name="TokenSpeed",
    prefix="tokenspeed:",
    ranks=("engine", "dp_rank"),
    copies=("tp_rank", "pp_rank", "moe_ep_rank"),
    counters={**_SPECULATION, **_TOKENS, "cache_hits": ("prefix_cache_hits",)},
    gauges=_LOAD,
    histograms=_TIMES,
    wanted=("rounds", "drafted", "accepted", "generated", "running", "waiting"),
    between_tokens="token",
)
DIALECTS: Final = (OURS, VLLM, SGLANG, TOKENSPEED)

# Told to the user whatever the figures are: where an engine's version gives a family another meaning.
_PAST_END: Final = (
    "this vLLM may count accepted tokens past the end of an answer, which makes acceptance look better than it is, "
    "most of all with short answers"
)
VERSION_NOTES: Final[tuple[tuple[str, str, str, str], ...]] = (("vLLM", "0.29", "0.30", _PAST_END),)


def version_note(dialect: str, version: str) -> str:
    """What to know about this version's figures; empty when nothing is known."""
    from packaging.version import InvalidVersion, Version

    try:
        found = Version(version)
    except InvalidVersion:
        return ""
    notes = [
        text for name, low, high, text in VERSION_NOTES if name == dialect and Version(low) <= found < Version(high)
    ]
    return "; ".join(notes)
