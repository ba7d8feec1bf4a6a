"""The sampling pipeline against its definition, written out one token at a time; and the random streams."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3dspark.decoding import SamplingParams
from k3dspark.decoding.sampling import History, adjust, distribution, draw
from k3dspark.decoding.streams import Stream, coarse_uniforms, philox, uniforms
from k3dspark.errors import BadInput

params = st.builds(
    SamplingParams,
    temperature=st.floats(0.2, 3),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 300, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 0.99]),
)


def by_definition(logits: list[float], settings: SamplingParams) -> list[float]:
    """Temperature, top-k, top-p, min-p, renormalise: sorted lists and no cleverness; ties at a cut stay."""
    top = max(logits)
    weights = [math.exp((x - top) / settings.temperature) for x in logits]
    if settings.top_k:
        least = sorted(weights, reverse=True)[min(settings.top_k, len(weights)) - 1]
        weights = [w if w >= least else 0.0 for w in weights]
    if settings.top_p < 1:
        mass, total = 0.0, sum(weights)
        for w in sorted(weights, reverse=True):
            mass += w
            if mass >= settings.top_p * total:
                weights = [x if x >= w else 0.0 for x in weights]
                break
    weights = [w if w >= settings.min_p * max(weights) else 0.0 for w in weights]
    return [w / sum(weights) for w in weights]


@settings(max_examples=150, deadline=None)
@given(st.lists(params, min_size=1, max_size=4), st.sampled_from([3, 50, 700]), st.integers(0, 10**6), st.booleans())
def test_distribution_is_its_definition(settings: list[SamplingParams], vocab: int, seed: int, flat: bool) -> None:
    random = torch.Generator().manual_seed(seed)
    # Distinct values; `flat` ones need more than the first best to reach a top-p.
    logits = torch.randn(len(settings), vocab, generator=random, dtype=torch.float64) * (0.1 if flat else 4)
    expected = [by_definition(row, s) for row, s in zip(logits.tolist(), settings, strict=True)]
    torch.testing.assert_close(
        distribution(logits, settings), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("changes", [{"top_k": 2}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.9}])
def test_tokens_that_tie_at_a_cut_stay_together(changes: dict[str, Any]) -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    probs = distribution(logits, [SamplingParams(temperature=1.0, **changes)])
    assert (probs > 0).tolist() == [[True, True, True, True, False]]


def test_rows_do_not_depend_on_their_neighbours() -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 5000, generator=random)
    cuts = ((1.0, 0.95, 0), (0.7, 1.0, 0), (1.3, 0.999, 0), (1.0, 1.0, 40), (0.5, 0.8, 900), (1.0, 1.0, 0))
    settings = [SamplingParams(temperature=t, top_p=p, top_k=k) for t, p, k in cuts]
    together = distribution(logits, settings)
    for row, own in enumerate(settings):
        assert torch.equal(distribution(logits[row : row + 1], [own])[0], together[row])


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 5), max_size=6),
    new=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    drafted=st.lists(st.integers(0, 5), max_size=5),
    presence=st.sampled_from([0.0, 0.7, -0.5]),
    frequency=st.sampled_from([0.0, 0.3, -0.2]),
    repetition=st.sampled_from([1.0, 1.3, 0.8]),
    bias=st.dictionaries(st.integers(0, 5), st.floats(-5, 5), max_size=3),
)
def test_penalties_of_a_row_count_the_drafted_tokens_before_it(
    prompt: list[int],
    new: list[int],
    drafted: list[int],
    presence: float,
    frequency: float,
    repetition: float,
    bias: dict[int, float],
) -> None:
    """A history that is off by one row gives a biased output (hazard I-27)."""
    own = SamplingParams(
        presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition, logit_bias=bias
    )
    logits = torch.randn(len(drafted) + 1, 6, dtype=torch.float64)
    expected = logits.clone()
    for row in range(len(drafted) + 1):
        output = [*new, *drafted[:row]]
        for v in range(6):
            x = float(logits[row, v]) + bias.get(v, 0.0)
            if v in output or v in prompt:
                x = x / repetition if x > 0 else x * repetition
            expected[row, v] = x - frequency * output.count(v) - presence * (v in output)
    before = logits.clone()
    adjusted = adjust(logits, torch.tensor(drafted, dtype=torch.long), History(prompt, new), own)
    torch.testing.assert_close(adjusted, expected, rtol=0, atol=1e-12)
    assert torch.equal(logits, before)


def test_draw_gives_each_id_exactly_its_mass() -> None:
    mass = torch.tensor([0.0, 2.0, 0.0, 1.0, 5.0, 0.0], dtype=torch.float64)
    u = (torch.arange(800, dtype=torch.float64) + 0.5) / 800
    ids = draw(mass.expand(800, 6), u)
    assert torch.bincount(ids, minlength=6).tolist() == [0, 200, 0, 100, 500, 0]


def test_draw_at_the_very_ends_never_takes_an_id_without_mass() -> None:
    mass = torch.tensor([[0.0, 1e-30, 0.3, 0.0]]).expand(3, 4)
    assert draw(mass, torch.tensor([0.0, 1 - 2**-53, 1.0], dtype=torch.float64)).tolist() == [1, 2, 2]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", True),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 1.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("inf")),
        ("frequency_penalty", "1"),
        ("logit_bias", {3: float("inf")}),
        ("seed", -1),
        ("seed", 2**64),
        ("logprobs", -1),
        ("verifier", "best"),
        ("stop_strings", "word"),
        ("stop_strings", ("",)),
    ],
)
def test_nonsense_parameter_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(BadInput, match=field):
        replace(SamplingParams(), **{field: value})  # type: ignore[arg-type]


# -- random streams


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_its_published_test_vectors(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox([np.array([c], dtype=np.uint64) for c in counter], [np.array([k], dtype=np.uint64) for k in key])
    assert [int(w[0]) for w in words] == expected


def test_every_use_of_a_number_has_its_own() -> None:
    seen = torch.cat([
        uniforms([seed] * 50, range(50), stream, 7).flatten() for seed in (0, 1, 2**63) for stream in Stream
    ])  # fmt: skip
    assert len(seen.unique()) == 3 * 3 * 50 * 7


def test_numbers_do_not_depend_on_the_batch() -> None:
    together = uniforms([5, 6, 7], [10, 11, 12], Stream.ACCEPT, 7)
    assert torch.equal(uniforms([6], [11], Stream.ACCEPT, 7)[0], together[1])


def test_numbers_are_uniform_and_streams_uncorrelated() -> None:
    columns = [uniforms(range(4000), [3] * 4000, stream, 4) for stream in Stream]
    every = torch.cat(columns, 1)  # [4000, 12]
    assert every.min() >= 0
    assert every.max() < 1
    torch.testing.assert_close(every.mean(0), torch.full((12,), 0.5, dtype=torch.float64), atol=0.02, rtol=0)
    correlation = torch.corrcoef(every.T) - torch.eye(12)
    assert correlation.abs().max() < 0.07


def test_coarse_numbers_stay_below_one_in_fp32() -> None:
    numbers = coarse_uniforms(range(1000), [1] * 1000, Stream.DRAFT, 7)
    assert torch.equal(numbers.float().double(), numbers)
    assert numbers.float().max() < 1
