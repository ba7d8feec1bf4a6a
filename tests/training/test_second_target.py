"""A draft made from nothing for another target: what it knows, it reads from that target's taps.

The target is a small Qwen3 that was taught a language in a few seconds: a prompt names a rule and a letter, the answer
goes on from the letter as the rule says. Which rule it is cannot be seen from the last token, only from the context.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from k3dspark.target.batch import BatchForward
from k3dspark.target.weights import LlamaWeights
from k3dspark.training.evaluate import replay_greedy
from k3dspark.training.loss import LossWeights
from k3dspark.training.pipeline import default_taps
from k3dspark.training.regenerate import RegenerateSettings, Regenerator
from k3dspark.training.shards import Sequence, ShardStore
from k3dspark.training.trainer import Trainer, TrainSettings
from small_training import load_llama, small_draft
from tiny_models import CHAT_TEMPLATE, VOCABULARY, byte_tokenizer

LETTERS = "abcdefghijklmnop"
RULES = 3
ANSWER = 24


def successors(rule: int) -> dict[str, str]:
    """The letter after each letter: one cycle through all of them, another for each rule."""
    order = random.Random(rule).sample(LETTERS, len(LETTERS))
    return dict(zip(order, order[1:] + order[:1], strict=True))


def conversation(rng: random.Random) -> tuple[str, str]:
    rule, letter = rng.randrange(RULES), rng.choice(LETTERS)
    prompt, answer = f"{rng.randrange(10**6):06d} {rule} {letter}", ""
    for _ in range(ANSWER):
        letter = successors(rule)[letter]
        answer += letter
    return prompt, answer


def tokens(tokenizer: PreTrainedTokenizerFast, prompt: str, answer: str = "") -> list[int]:
    turns = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) + answer
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int) -> float:
    """Train the target on the language; returns its share of right letters at the end."""
    rng = random.Random(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.0)
    right = 0.0
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 20, 2 * (steps - step) / steps)
        ids = torch.tensor([tokens(tokenizer, *conversation(rng)) for _ in range(24)])  # all of one length
        logits = model(ids[:, :-1]).logits[:, -ANSWER:]
        labels = ids[:, -ANSWER:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        right = float((logits.argmax(-1) == labels).float().mean())
    return right


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> LlamaWeights:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=7, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=True,
        initializer_range=0.1, bos_token_id=256, eos_token_id=257, pad_token_id=258,
    )  # fmt: skip
    model, tokenizer = Qwen3ForCausalLM(config), byte_tokenizer(CHAT_TEMPLATE)
    assert teach(model, tokenizer, 250) > 0.9
    directory = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return load_llama(directory)


class ShuffledStore(ShardStore):
    """Every row of taps is exchanged for one of another place in another conversation; all else is as recorded."""

    def taps(self, sequence: Sequence) -> Tensor:
        rows = sequence.end - sequence.start
        others = [s for s in self.train if s != sequence][:40]
        pool = torch.cat([self.rows("taps", s)[:-1] for s in others]).float()
        return pool[torch.randint(len(pool), (rows,), generator=torch.Generator().manual_seed(sequence.start))]


def test_acceptance_comes_from_the_taps(taught: LlamaWeights, tmp_path: Path) -> None:
    rng = random.Random(1)
    settings = RegenerateSettings(
        group=60, answers=1, max_answer_tokens=ANSWER, temperatures=(0.0,), temperature_weights=(1.0,)
    )
    forward = BatchForward(taught, tuple(default_taps(taught.shape.layers)))
    prompts = [conversation(rng)[0] for _ in range(240)]
    source = Regenerator(forward, byte_tokenizer(CHAT_TEMPLATE), [257], settings, [], prompts)
    source.write_shards(tmp_path / "data", 10**6, "s")
    store = ShardStore(tmp_path / "data", eval_fraction=0.2)
    assert len(store.evaluation) > 20

    model = small_draft(taught, torch.cat([store.rows("taps", s)[:-1] for s in store.train[:20]]).float())
    before = replay_greedy(model, store, store.evaluation).acceptance_length
    training = TrainSettings(
        steps=250, sequences=8, anchors=16, learning_rate=4e-3, optimiser="adamw",
        loss=replace(LossWeights(), ce=1.0, l1=0.0), evaluate_every=1000, checkpoint_every=1000,
    )  # fmt: skip
    Trainer(model, store, training, tmp_path / "out").run(lambda _: None, evaluate=False)

    true = replay_greedy(model, store, store.evaluation).acceptance_length
    shuffled = replay_greedy(model, ShuffledStore(tmp_path / "data", 0.2), store.evaluation).acceptance_length
    assert before < 1.5
    assert true > shuffled + 2.0
