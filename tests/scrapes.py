"""Recorded scrapes and small made ones, for tests of monitoring and diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from k3dspark.monitoring.exposition import Exposition, parse
from k3dspark.monitoring.scrape import Scrape

SAMPLES = Path(__file__).parent / "monitoring" / "samples"


def sample(name: str) -> str:
    return (SAMPLES / f"{name}.txt").read_text(encoding="utf-8")


def recorded(name: str) -> Exposition:
    return parse(sample(name))


def scrape(text: str, time: float, source: str = "http://a/metrics") -> Scrape:
    return Scrape(source, time, parse(text))


def vllm(
    rounds: float,
    slots: Sequence[float],
    engine: str = "0",
    drafted: float | None = None,
    accepted: float | None = None,
    more: Mapping[str, float] | None = None,
) -> str:
    """A vLLM engine's counters; `more` maps names without the prefix to values."""
    labels = f'engine="{engine}",model_name="m"'
    lines = [
        f"vllm:spec_decode_num_drafts_total{{{labels}}} {rounds}",
        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {rounds * len(slots) if drafted is None else drafted}",
        f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {sum(slots) if accepted is None else accepted}",
    ]
    lines += [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{k}"}} {value}'
        for k, value in enumerate(slots)
    ]
    lines += [f"vllm:{name}{{{labels}}} {value}" for name, value in (more or {}).items()]
    return "\n".join(lines) + "\n"
