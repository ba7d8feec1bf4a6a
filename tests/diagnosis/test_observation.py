"""Acceptance of single requests, read from saved responses."""

from __future__ import annotations

import json

import pytest

from k3dspark.diagnosis.observation import Observation, from_recording, from_responses, pool
from k3dspark.errors import BadInput


def response(speculation: dict[str, object] | None, **usage: object) -> str:
    return json.dumps({"usage": usage, "metrics": {"speculative_decoding": speculation}})


def test_our_server_tells_rounds_and_accepted_tokens() -> None:
    line = response({"rounds": 40, "accepted_tokens": 90}, prompt_tokens=1000, completion_tokens=131)
    assert from_responses([line], "f") == [Observation(1000, None, 40, 90)]


def test_vllm_s_steps_are_counted() -> None:
    speculation = {"mean_acceptance_length": 3.0, "per_step_accepted": [2, 0, 4], "per_step_drafted": [7, 7, 7]}
    line = response(speculation, prompt_tokens=8, completion_tokens=9, prompt_tokens_details={"cached_tokens": 4})
    assert from_responses([line], "f") == [Observation(8, 0.5, 3, 6)]


def test_vllm_s_mean_length_gives_the_rounds() -> None:
    line = response(
        {"mean_acceptance_length": 2.5, "draft_acceptance_rate": 0.2}, prompt_tokens=8, completion_tokens=101
    )
    assert from_responses(["data: " + line, "", "data: [DONE]"], "f") == [Observation(8, None, 40, 60)]


@pytest.mark.parametrize(
    "speculation",
    [
        None,
        {},
        {"rounds": 0, "accepted_tokens": 0},
        {"mean_acceptance_length": None},
        {"rounds": "many"},
        {"rounds": True},
    ],
)
def test_a_response_without_figures_is_passed_over(speculation: dict[str, object] | None) -> None:
    good = response({"rounds": 1, "accepted_tokens": 1}, prompt_tokens=1)
    assert len(from_responses([response(speculation, prompt_tokens=9, completion_tokens=9), good], "f")) == 1


def test_responses_without_any_figures_are_refused_with_the_option_to_set() -> None:
    with pytest.raises(BadInput) as caught:
        from_responses([response(None, prompt_tokens=1), "[]"], "f")
    assert "--per-request-spec-decode-metrics" in caught.value.remedy


def test_a_broken_line_is_named() -> None:
    with pytest.raises(BadInput, match="line 2"):
        from_responses(["{}", "{"], "f")


def test_windows_of_a_recording_stand_for_their_requests() -> None:
    entry = {"model": "m", "rounds": 10, "accepted": 20, "mean_prompt_tokens": 300.0, "prefix_hit_ratio": 0.25}
    documents = [{"models": [entry, {**entry, "model": "n"}]}, {"models": [{**entry, "rounds": None}]}]
    assert from_recording(documents, "m") == [Observation(300.0, 0.25, 10, 20)]


def test_pooling_weighs_requests_by_their_rounds() -> None:
    pooled = pool([Observation(1, None, 10, 20), Observation(1, None, 30, 30)])
    assert (pooled.length, pooled.rounds, pooled.count) == (1 + 50 / 40, 40, 2)
    # Residuals 20 − 12.5 and 30 − 37.5: error = √(2 · 112.5) / 40.
    assert pooled.error == pytest.approx(15 / 40)
