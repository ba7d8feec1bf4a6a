"""YaRN frequencies, the interleaved rotation, and the softmax scale against the vectors of spec §A.6."""

from __future__ import annotations

import pytest
import torch

from k3dspark.model.config import K3DSparkConfig
from k3dspark.model.ops import rotate_interleaved
from k3dspark.model.rope import Rope

PUBLISHED = K3DSparkConfig.published()
FREQUENCIES = {
    0: 1.000000000, 1: 7.131110849e-1, 2: 5.085274194e-1, 8: 6.687403050e-2, 14: 8.794286766e-3, 15: 6.271303377e-3,
    16: 4.078283073e-3, 17: 2.627408010e-3, 18: 1.673348787e-3, 20: 6.472429222e-4, 21: 3.889254467e-4,
    22: 2.255533216e-4, 24: 6.202298922e-5, 25: 2.544698367e-5, 26: 4.752661605e-6, 31: 8.764412912e-7,
}  # fmt: skip


@pytest.fixture
def rope() -> Rope:
    return Rope.from_parameters(64, PUBLISHED.rope_parameters)


@pytest.mark.parametrize(("index", "expected"), FREQUENCIES.items())
def test_yarn_frequencies_of_the_published_draft(rope: Rope, index: int, expected: float) -> None:
    assert float(rope.frequencies[index]) == pytest.approx(expected, rel=2e-9)


def test_rotation_pairs_neighbours_and_matches_the_vector(rope: Rope) -> None:
    cos, sin = rope.angles(torch.tensor([1000]), torch.float64)
    rotated = rotate_interleaved(torch.arange(1.0, 65.0, dtype=torch.float64)[None], cos, sin)[0]
    first = torch.tensor([-1.09138, 1.95163769, -3.12038053, -3.9068178], dtype=torch.float64)
    last = torch.tensor([60.92375353, 62.07492453, 62.94388357, 64.05519121], dtype=torch.float64)
    torch.testing.assert_close(rotated[:4], first, atol=1e-5, rtol=0)
    torch.testing.assert_close(rotated[60:], last, atol=1e-5, rtol=0)


def test_softmax_scale_is_corrected_once_and_the_table_is_not(rope: Rope) -> None:
    assert rope.multiplier == 1.0
    assert pytest.approx(0.13086080, abs=1e-8) == PUBLISHED.softmax_scale


def test_a_lost_mscale_all_dim_moves_the_correction_to_the_table() -> None:
    lost = {k: v for k, v in PUBLISHED.rope_parameters.items() if k != "mscale_all_dim"}
    assert Rope.from_parameters(64, lost).multiplier == pytest.approx(1.3466, abs=1e-4)


def test_fp32_angles_stay_within_the_known_rounding_at_the_end_of_a_million_tokens(rope: Rope) -> None:
    position = torch.tensor([2**20 - 1])
    exact = position.double()[:, None] * rope.frequencies
    rounded = (position.float()[:, None] * rope.frequencies.float()).double()
    assert 1e-3 < float((exact - rounded).abs().max()) < 0.07
    assert float((exact - rounded).abs()[:, 14:].max()) < 1e-3


def test_scores_depend_on_distance_only(rope: Rope) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 64, dtype=torch.float64)

    def score(a: int, b: int) -> float:
        q = rotate_interleaved(query, *rope.angles(torch.tensor(a), torch.float64))
        k = rotate_interleaved(key, *rope.angles(torch.tensor(b), torch.float64))
        return float(q @ k)

    assert score(17, 5) == pytest.approx(score(1017, 1005), abs=1e-9)
    assert abs(score(17, 5) - score(17, 6)) > 1e-3
