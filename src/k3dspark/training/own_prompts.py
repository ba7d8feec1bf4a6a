"""Prompts for a target that has none: templates, and user turns that the target itself goes on writing."""

from __future__ import annotations

import random

from k3dspark.decoding.engine import Engine
from k3dspark.decoding.params import SamplingParams
from k3dspark.decoding.request import FinishReason
from k3dspark.embedded.pair import ModelPair
from k3dspark.training.prompts import normalized, opening, template_prompt

TEMPERATURE = 0.9
MOST_TOKENS = 72  # of a written turn; one that does not end by then was cut in the middle of a sentence
SHORTEST = 8  # letters and digits
TRIES = 4  # turns begun for each that is wanted


def own_prompts(pair: ModelPair, count: int, seed: int = 0) -> list[str]:
    """`count` different prompts, half of them templates, half written by the target after a few given words.

    A target that seldom ends its turns, or has no chat template to write one in, leaves more to the templates.
    """
    rng = random.Random(seed)
    written = _written(pair, count // 2, rng) if pair.tokenizer.chat_template else []
    found = {normalized(text): text for text in written}
    while len(found) < count:
        text = template_prompt(rng)
        found.setdefault(normalized(text), text)
    return list(found.values())


def _written(pair: ModelPair, count: int, rng: random.Random) -> list[str]:
    engine = Engine(pair.target, pair.draft)
    marker = "\x00"
    header = str(pair.tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)).split(
        marker
    )[0]
    found: dict[str, str] = {}
    for _ in range(TRIES):
        requests = {}
        for _ in range(count - len(found)):
            text = opening(rng)
            ids = list(pair.tokenizer(header + text, add_special_tokens=False).input_ids)
            params = SamplingParams(
                max_new_tokens=MOST_TOKENS,
                temperature=TEMPERATURE,
                stop_token_ids=pair.stop_ids,
                seed=rng.getrandbits(64),
            )
            requests[engine.submit(ids, params)] = text
        while not engine.idle:
            engine.step()
        for request, text in requests.items():
            turn = (text + pair.text(request.new_ids)).strip()
            if request.finish_reason is FinishReason.STOP and len(normalized(turn)) >= SHORTEST:
                found.setdefault(normalized(turn), turn)
    return list(found.values())[:count]
