"""What `evaluate` measures: prompts read and chosen, rounds recorded as the engine ran them, figures pooled."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from k3dspark.decoding import DecodeStats, Engine, Load, Outcome, SamplingParams
from k3dspark.embedded.pair import ModelPair, load_pair
from k3dspark.errors import BadInput
from k3dspark.training.measure import (
    EvaluationPrompt,
    MeasureSettings,
    Rounds,
    _Recorder,
    bootstrap_interval,
    group_record,
    groups,
    measure,
    prompt_seed,
    read_evaluation_prompts,
    slot_reliability,
)
from tiny_models import write_pair

PROMPTS = [
    EvaluationPrompt("a", "Why is it late?", 0),
    EvaluationPrompt("b", "Add 2 and 2.", 1),
    EvaluationPrompt("a", "Hello", 2),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> ModelPair:
    root = tmp_path_factory.mktemp("pair")
    return load_pair(*write_pair(root), dtype="float32")


def settings(temperature: float = 0.0) -> MeasureSettings:
    return MeasureSettings(temperature=temperature, max_new_tokens=24, seed=5)


# -- prompts ---------------------------------------------------------------------------------------------------------


def written(path: Path, *entries: dict[str, str]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def test_a_prompt_without_a_domain_belongs_to_its_file(tmp_path: Path) -> None:
    lines = tmp_path / "letters.txt"
    lines.write_text("Dear Sir\n\nDear Madam\n", encoding="utf-8")
    objects = written(tmp_path / "mixed.jsonl", {"prompt": "x"}, {"prompt": "y", "domain": "code"})
    found = read_evaluation_prompts([lines, objects])
    assert [(p.domain, p.text, p.number) for p in found] == [
        ("letters", "Dear Sir", 0), ("letters", "Dear Madam", 1), ("mixed", "x", 2), ("code", "y", 3),
    ]  # fmt: skip


def test_limits_and_domains_leave_the_number_of_a_prompt_alone(tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", *({"prompt": f"p{i}", "domain": "ab"[i % 2]} for i in range(6)))
    assert [p.number for p in read_evaluation_prompts([path], limit=2)] == [0, 1, 2, 3]
    assert [p.number for p in read_evaluation_prompts([path], ["b"], 2)] == [1, 3]


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "not JSON"), ("[1]", "no prompt"), ('{"prompt": " "}', "no prompt"), ("", "no prompts"),
     ('{"prompt": "x", "domain": "all"}', "domain 'all'")],
)  # fmt: skip
def test_a_file_that_holds_no_prompts_is_named_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(BadInput, match=words):
        read_evaluation_prompts([path])


def test_an_unknown_domain_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="the files have code"):
        read_evaluation_prompts([written(tmp_path / "p.jsonl", {"prompt": "x", "domain": "code"})], ["chat"])


# -- rounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_recorded_rounds_add_up_to_the_engines_counters(pair: ModelPair, temperature: float) -> None:
    for one in measure(pair, PROMPTS, settings(temperature)):
        slots = torch.arange(7)
        assert one.stats.rounds >= len(one.rounds.verified) > 0
        assert one.rounds.verified.sum() == one.stats.drafted
        assert one.rounds.accepted.sum() == one.stats.accepted
        assert (slots < one.rounds.accepted[:, None]).sum(0).tolist() == one.stats.accepted_by_slot
        assert one.rounds.confidence.shape == (len(one.rounds.verified), 7)


def test_figures_of_a_prompt_do_not_depend_on_the_others(pair: ModelPair) -> None:
    together = measure(pair, PROMPTS, settings(1.0))
    alone = [measure(pair, [prompt], settings(1.0))[0] for prompt in reversed(PROMPTS)][::-1]
    for a, b in zip(together, alone, strict=True):
        assert (a.stats.rounds, a.stats.accepted_by_slot) == (b.stats.rounds, b.stats.accepted_by_slot)
        assert torch.equal(a.rounds.confidence, b.rounds.confidence)


def test_what_is_measured_is_what_the_engine_generates(pair: ModelPair) -> None:
    found = measure(pair, PROMPTS[:1], settings(1.0))[0]
    params = SamplingParams(
        max_new_tokens=24, temperature=1.0, seed=prompt_seed(5, 0), stop_token_ids=pair.stop_ids
    )  # fmt: skip
    result = Engine(pair.target, pair.draft).generate(pair.chat_ids(PROMPTS[0].text), params)
    assert (found.stats.new_tokens, found.stats.accepted) == (len(result.token_ids), result.stats.accepted)


def test_nothing_behind_an_accepted_stop_token_is_counted(pair: ModelPair) -> None:
    """A stop token that was accepted counts as accepted; what the block holds behind it does not."""
    recorder = _Recorder()
    load = Load((0,), (9,), (7,))
    for accepted in (3, 5):
        recorder.lengths(torch.zeros(1, 7), load)
        recorder.observe(Outcome(load, (7,), (accepted,), 0.0, 0.0))
    # of the second round's five tokens the third was the stop token: two draft tokens committed before it
    rounds = recorder.rounds(committed=3 + 2, slots=7)
    assert rounds.accepted.tolist() == [3, 3]
    assert rounds.verified.tolist() == [7, 3]


# -- figures ---------------------------------------------------------------------------------------------------------


def test_groups_pool_counters_and_never_average_ratios(pair: ModelPair) -> None:
    measured = measure(pair, PROMPTS, settings())
    whole, a, b = groups(measured, True, seed=0)
    assert [(g.name, g.prompts) for g in (whole, a, b)] == [("all", 3), ("a", 2), ("b", 1)]
    assert whole.stats.rounds == a.stats.rounds + b.stats.rounds
    record = group_record(whole)
    assert record["acceptance_length"] == 1 + record["accepted"] / record["rounds"]
    assert record["acceptance_rate"] == record["accepted"] / record["drafted"]
    assert sum(record["per_slot_acceptance"]) == pytest.approx(record["acceptance_length"] - 1)
    assert record["confidence"]["conditional"]["per_slot"][0] == record["confidence"]["survival"]["per_slot"][0]
    json.dumps(record, allow_nan=False)


def test_the_interval_narrows_with_prompts_and_holds_the_pooled_value() -> None:
    rng = np.random.default_rng(0)
    stats = [DecodeStats(rounds=20, accepted=int(a)) for a in rng.integers(10, 50, 400)]
    few, many = bootstrap_interval(stats[:25], 1), bootstrap_interval(stats, 1)
    pooled = sum(stats, DecodeStats()).acceptance_length
    assert many[0] < pooled < many[1]
    # four times the root of sixteen times the prompts
    assert (few[1] - few[0]) / (many[1] - many[0]) == pytest.approx(4, rel=0.35)
    assert bootstrap_interval(stats[:1] * 5, 1) == (stats[0].acceptance_length,) * 2


def test_reliability_counts_a_slot_only_where_its_question_was_asked() -> None:
    """Three slots; a block cut to two, one accepted whole, one whose second token was rejected."""
    rounds = Rounds(
        confidence=torch.tensor([[2.0, 0.0, 0.0], [2.0, 1.0, 1.0], [2.0, -1.0, 0.0]]),
        verified=torch.tensor([2, 3, 3]),
        accepted=torch.tensor([2, 3, 1]),
    )
    found = slot_reliability(rounds)
    assert [r and r.count for r in found.conditional_by_slot] == [3, 3, 1]
    assert [r and r.count for r in found.survival_by_slot] == [3, 3, 2]
    second, third = found.conditional_by_slot[1], found.survival_by_slot[2]
    assert second is not None
    assert third is not None
    assert second.mean_outcome == pytest.approx(2 / 3)
    assert second.auroc == 1.0
    assert third.mean_outcome == 0.5
    step = torch.tensor([2.0, 1.0, 1.0]).double().sigmoid()
    other = torch.tensor([2.0, -1.0, 0.0]).double().sigmoid()
    assert third.mean_predicted == pytest.approx(float(step.prod() + other.prod()) / 2)


def test_a_slot_that_was_never_verified_has_no_figures() -> None:
    found = slot_reliability(Rounds(torch.zeros(1, 3), torch.tensor([1]), torch.tensor([1])))
    assert found.conditional_by_slot[1] is None
    assert found.survival_by_slot[2] is None
