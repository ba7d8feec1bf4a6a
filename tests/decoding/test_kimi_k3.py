"""The miniature of Kimi K3, all 93 layers, decoding with its draft: the target's own tokens, in either stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from k3dspark.checkpoint.jsonfile import read_config
from k3dspark.checkpoint.synth import synthesise
from k3dspark.decoding import Engine, SamplingParams
from k3dspark.embedded.pair import load_pair
from k3dspark.errors import BadInput
from k3dspark.model.config import K3DSparkConfig
from k3dspark.model.draft import K3DSparkModel
from k3dspark.model.loading import load_draft, save_draft
from k3dspark.model.proposal import Proposal
from k3dspark.target.kimi_k3 import KimiK3Target
from k3dspark.target.kimi_k3_loading import load_kimi_k3
from k3dspark.target.kimi_k3_model import KimiK3Model
from target.small_k3 import random_tensors, rotated, small_shape, write_small_k3
from tiny_models import VOCABULARY
from toy_models import scripted, toy_draft

PROMPTS, NEW = 20, 8
TAPS = (2, 23, 47, 71, 89)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("k3") / "pair"
    synthesise(place, mini_k3="prefix")
    return place


@pytest.fixture(scope="module")
def model(directory: Path) -> KimiK3Model:
    """In fp64: a near-tie of its routers must not decide a test."""
    return load_kimi_k3(directory / "target", read_config(directory / "target"), torch.float64)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (3 + i % 5,), generator=generator).tolist() for i in range(PROMPTS)]


def decode(target: KimiK3Target, draft: K3DSparkModel | None) -> list[list[int]]:
    engine = Engine(target, draft)
    requests = [engine.submit(prompt, SamplingParams(NEW)) for prompt in prompts()]
    while not engine.idle:
        engine.step()
    return [request.new_ids for request in requests]


@pytest.fixture(scope="module")
def plain(model: KimiK3Model) -> list[list[int]]:
    answers = decode(KimiK3Target(model), None)
    assert len({tuple(answer) for answer in answers}) > PROMPTS // 2, "the answers must depend on the prompts"
    return answers


@pytest.mark.parametrize("stream", ["prefix", "attn_res"])
def test_twenty_prompts_decode_with_a_random_draft_as_without(
    directory: Path, model: KimiK3Model, plain: list[list[int]], stream: Literal["prefix", "attn_res"]
) -> None:
    draft = load_draft(directory / "draft").eval()
    assert tuple(draft.config.target_layer_ids) == TAPS
    assert decode(KimiK3Target(model, TAPS, stream), draft) == plain


def test_rounds_that_accept_a_part_of_the_block_decode_as_plainly(model: KimiK3Model, plain: list[list[int]]) -> None:
    target, prompt = KimiK3Target(model, (2, 89)), prompts()[0]
    draft = scripted(target, [*prompt, *plain[0]], lambda position: position % 3 == 1)
    result = Engine(target, draft).generate(prompt, SamplingParams(NEW))
    assert list(result.token_ids) == plain[0]
    assert 1 < result.stats.acceptance_length < 7


def test_the_pair_loads_with_the_stream_that_its_draft_names(directory: Path, tmp_path: Path) -> None:
    pair = load_pair(directory / "target", directory / "draft", dtype="float32")
    assert isinstance(pair.target, KimiK3Target)
    assert (pair.target.stream, pair.target.tap_layer_ids) == ("prefix", TAPS)
    assert pair.stop_ids == (257, 258)
    assert pair.text(pair.raw_ids("héllo")) == "héllo"
    assert K3DSparkConfig.from_file(directory / "draft").aux_hidden_stream == "prefix"
    synthesise(tmp_path / "other", mini_k3="attn_res", sparse=True)
    config: dict[str, Any] = json.loads((tmp_path / "other" / "draft" / "config.json").read_text())
    assert config["aux_hidden_stream"] == "attn_res"


def test_a_stream_that_does_not_exist_is_refused(model: KimiK3Model) -> None:
    with pytest.raises(BadInput, match="unknown tap stream"):
        KimiK3Target(model, TAPS, "residual")  # type: ignore[arg-type]


def test_a_draft_beside_the_rotated_directory_drafts_the_same_blocks(tmp_path: Path) -> None:
    """QuaRot end to end: two directories of one target, one draft with its own embedding and head."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "eos_token_id": 257}
    tensors = random_tensors(small_shape(**sizes))
    rotation = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    plain = write_small_k3(tmp_path / "plain", tensors, **sizes)
    turned = write_small_k3(tmp_path / "turned", rotated(tensors, rotation), **sizes)
    embed = tensors["language_model.model.embed_tokens.weight"]
    target = KimiK3Target(load_kimi_k3(plain, read_config(plain), torch.float32), (0, 2, 5))
    draft = toy_draft(target, hidden_size=32, torch_dtype="float32").float()
    draft.embed_tokens.weight.copy_(embed)
    save_draft(draft, tmp_path / "draft", include_lm_head=True)

    answers: list[tuple[int, ...]] = []
    blocks: list[torch.Tensor] = []
    for directory in (plain, turned):
        pair = load_pair(directory, tmp_path / "draft", dtype="float32")
        assert pair.draft is not None
        torch.testing.assert_close(pair.draft.embed_tokens.weight, embed)
        kept = Recording(pair.draft)
        ids = pair.raw_ids("a prompt of some length")
        plainly = Engine(pair.target, None).generate(ids, SamplingParams(24)).token_ids
        assert Engine(pair.target, kept.draft).generate(ids, SamplingParams(24)).token_ids == plainly
        answers.append(tuple(plainly))
        blocks.append(torch.cat(kept.blocks))
    assert answers[0] == answers[1]
    assert torch.equal(*blocks)

    # Had nothing undone the rotation, the blocks would be others.
    pair = load_pair(turned, tmp_path / "draft", dtype="float32")
    unaware = Recording(load_draft(tmp_path / "draft", dtype=torch.float32).eval())
    Engine(pair.target, unaware.draft).generate(pair.raw_ids("a prompt of some length"), SamplingParams(24))
    assert not torch.equal(torch.cat(unaware.blocks)[: len(blocks[0])], blocks[0])


class Recording:
    """A draft that also keeps every block it proposes."""

    def __init__(self, draft: K3DSparkModel) -> None:
        self.draft, self.blocks = draft, list[torch.Tensor]()
        propose = draft.propose

        def kept(*given: Any, **named: Any) -> Proposal:
            proposal = propose(*given, **named)
            self.blocks.append(proposal.tokens)
            return proposal

        draft.propose = kept  # type: ignore[method-assign]
