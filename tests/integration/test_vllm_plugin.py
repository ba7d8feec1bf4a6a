"""Our draft inside vLLM on CPU proposes the very tokens that it proposes in our engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from k3dspark.decoding import Engine, SamplingParams
from k3dspark.embedded.pair import EMBEDDED_DRAFT, load_pair
from k3dspark.embedded.target import embedded_target_dir
from k3dspark.model.draft import K3DSparkModel
from vllm_environment import inside_vllm, needs_vllm

pytestmark = [pytest.mark.integration, needs_vllm]


def in_our_engine(
    target: Path, draft: Path, prompt: list[int], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], list[list[int]]]:
    """Our engine's greedy answer, and every block that it drafted."""
    blocks: list[list[int]] = []
    sample = K3DSparkModel.sample

    def watch(self: K3DSparkModel, *arguments: Any, **options: Any) -> Any:
        proposal = sample(self, *arguments, **options)
        blocks.append(proposal.tokens[0].tolist())
        return proposal

    monkeypatch.setattr(K3DSparkModel, "sample", watch)
    pair = load_pair(target, draft, dtype="float32")
    result = Engine(pair.target, pair.draft).generate(prompt, SamplingParams(max_new_tokens=tokens))
    return list(result.token_ids), blocks


def in_vllm(target: Path, draft: Path, prompt: list[int], tokens: int, proposals: int) -> dict[str, Any]:
    question = {"target": str(target), "draft": str(draft), "prompt": prompt, "tokens": tokens, "proposals": proposals}
    answer: dict[str, Any] = inside_vllm("drafts", question, interpreted=True)
    return answer


def test_the_embedded_draft_proposes_the_same_tokens_in_vllm_and_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    target = embedded_target_dir()
    prompt = load_pair(target, None).chat_ids("What is 12 plus 30? Explain.")
    tokens, blocks = in_our_engine(target, EMBEDDED_DRAFT, prompt, 20, monkeypatch)
    theirs = in_vllm(target, EMBEDDED_DRAFT, prompt, 20, 7)
    assert theirs["tokens"] == tokens
    assert len(blocks) >= 5
    assert theirs["blocks"][: len(blocks)] == blocks
    assert theirs["metrics"]["vllm:spec_decode_num_accepted_tokens"] > 0
