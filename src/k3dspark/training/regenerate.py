"""Training data made by the target itself: prompts (own or given), answers, taps, and final hidden states.

One *shard* is one safetensors file with every tensor of a group of conversations:
`ids` [T] int32, `offsets` [n + 1], `answer_start` [n], `temperature` [n],
`taps` [T, N*d] fp16, `final` [T, d] fp16 (after the target's final norm), `log_normalizer` [T] fp32
(logsumexp of the target's logits; 0 on prompt rows), T = all tokens of the group.
Shards are written to a temporary name and renamed, so a killed run leaves only whole shards.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3dspark.target.batch import Stepped
from k3dspark.training.disk import ShardRoom, write_shard
from k3dspark.training.prompts import normalized, opening, overlaps, passages, template_prompt


@dataclass(frozen=True)
class RegenerateSettings:
    """How answers are sampled. A temperature of 0 is greedy; others sample from the `top_k` best tokens.

    Each of the `group` prompts of a shard is answered `answers` times, at different temperatures.
    """

    seed: int = 0
    group: int = 96
    answers: int = 2
    max_answer_tokens: int = 160
    max_prompt_tokens: int = 72
    top_k: int = 20
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    temperature_weights: tuple[float, ...] = (0.6, 0.2, 0.2)
    prompt_temperature: float = 0.9


class Regenerator:
    """Writes shards until told to stop."""

    def __init__(
        self,
        forward: Stepped,
        tokenizer: Any,
        stop_ids: Sequence[int],
        settings: RegenerateSettings,
        held_out: list[str],
        prompts: list[str] | None = None,
    ) -> None:
        self.forward = forward
        self.tokenizer = tokenizer
        self.stop_ids = torch.tensor(list(stop_ids))
        self.settings = settings
        self.held_out = held_out
        self.rng = random.Random(settings.seed)
        self.generator = torch.Generator().manual_seed(settings.seed)
        self._seen: set[str] = set()
        self._texts: list[str] = []  # of earlier answers: what rewriting prompts are about
        self._given = None if prompts is None else iter(prompts)

    def write_shards(
        self,
        directory: Path,
        tokens: int,
        name: str,
        report: Callable[[dict[str, float]], None] | None = None,
        room: ShardRoom | None = None,
    ) -> int:
        """Write shards `name-00000.safetensors` … until `tokens` answer tokens are made, or prompts or room end."""
        room = room or ShardRoom()
        directory.mkdir(parents=True, exist_ok=True)
        made, index = 0, 0
        while made < tokens and not room.used_up(directory):
            path = directory / f"{name}-{index:05d}.safetensors"
            started = time.perf_counter()
            prompts = self._prompts()
            if not prompts:
                break  # the prompt file is used up
            shard = self._shard(prompts)
            if not write_shard(shard, path, room):
                break
            answers = int((shard["offsets"].diff() - shard["answer_start"]).sum())
            made, index = made + answers, index + 1
            if report is not None:
                report({"answer_tokens": made, "tokens_per_second": answers / (time.perf_counter() - started)})
        return made

    # -- prompts -------------------------------------------------------------------------------------------------

    def _prompts(self) -> list[str]:
        if self._given is not None:
            candidates = list(islice(self._given, self.settings.group))
        else:
            half = self.settings.group // 2
            filled = [template_prompt(self.rng, self._texts) for _ in range(half)]
            candidates = filled + self._self_written(half)
        kept = []
        for prompt in candidates:
            key = normalized(prompt)
            if len(key) < 8 or key in self._seen or overlaps(prompt, self.held_out):
                continue
            self._seen.add(key)
            kept.append(prompt)
        return kept

    def _self_written(self, count: int) -> list[str]:
        openings = [opening(self.rng) for _ in range(count)]
        headers = [self._user_turn_header() + text for text in openings]
        ids = [self._encode(text) for text in headers]
        temperatures = torch.full((count,), self.settings.prompt_temperature)
        turns = self._generate(ids, temperatures, self.settings.max_prompt_tokens)
        prompts = []
        for text, turn in zip(openings, turns, strict=True):
            if not turn.ended:
                continue  # cut in the middle of a sentence
            prompts.append((text + self.tokenizer.decode(turn.answer, skip_special_tokens=True)).strip())
        return prompts

    def _user_turn_header(self) -> str:
        marker = "\x00"
        text = self.tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)
        return str(text).split(marker)[0]

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _keep_texts(self, turns: list[Turn]) -> None:
        for turn in turns:
            self._texts += passages(self.tokenizer.decode(turn.answer, skip_special_tokens=True), self.rng)
        self.rng.shuffle(self._texts)
        del self._texts[2000:]

    # -- answers -------------------------------------------------------------------------------------------------

    def _shard(self, prompts: list[str]) -> dict[str, Tensor]:
        ids = [
            self._encode(
                self.tokenizer.apply_chat_template(
                    [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
                )
            )
            for prompt in prompts
        ]
        choices = [t for _ in ids for t in self._temperatures()]
        ids = [prompt for prompt in ids for _ in range(self.settings.answers)]
        turns = self._generate(ids, torch.tensor(choices), self.settings.max_answer_tokens, record=True)
        self._keep_texts(turns)
        rows_ids, taps, final, normalizers, lengths, starts = [], [], [], [], [], []
        for prompt_ids, turn in zip(ids, turns, strict=True):
            answer = turn.answer + ([turn.stop_id] if turn.ended else [])
            keep = len(prompt_ids) + without_loop(answer)
            rows_ids.append(torch.tensor((prompt_ids + answer)[:keep], dtype=torch.int32))
            # The last token was never an input: its row is missing from the taps, so it is a label only.
            taps.append(_padded(turn.taps, keep))
            final.append(_padded(turn.final, keep))
            # The first logits belong to the last prompt row; answer rows follow.
            normalizer = torch.zeros(keep + 2)
            known = torch.tensor(turn.log_normalizer[: keep - len(prompt_ids) + 1])
            normalizer[len(prompt_ids) - 1 : len(prompt_ids) - 1 + len(known)] = known
            normalizers.append(normalizer[:keep])
            lengths.append(keep)
            starts.append(len(prompt_ids))
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        return {
            "ids": torch.cat(rows_ids),
            "offsets": offsets,
            "answer_start": torch.tensor(starts),
            "temperature": torch.tensor(choices),
            "taps": torch.cat(taps),
            "final": torch.cat(final),
            "log_normalizer": torch.cat(normalizers),
        }

    def _temperatures(self) -> list[float]:
        """Of one prompt's answers: drawn by weight, none twice while there are others."""
        left = dict(zip(self.settings.temperatures, self.settings.temperature_weights, strict=True))
        drawn: list[float] = []
        for _ in range(self.settings.answers):
            left = left or dict(zip(self.settings.temperatures, self.settings.temperature_weights, strict=True))
            drawn += self.rng.choices(list(left), list(left.values()))
            left.pop(drawn[-1])
        return drawn

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]], temperatures: Tensor, limit: int, record: bool = False) -> list[Turn]:
        head = self.forward.head
        turns = [Turn() for _ in prompts]
        state, last = self._prefill(prompts, limit, turns if record else None)
        active = torch.arange(len(prompts))
        done = torch.zeros(len(prompts), dtype=torch.bool)
        for step in range(limit):
            logits = last @ head.T
            tokens = self._sample(logits, temperatures[active])
            normalizers = logits.logsumexp(-1).tolist() if record else None
            stopped = torch.isin(tokens, self.stop_ids)
            for row, index in enumerate(active.tolist()):
                if done[row]:
                    continue
                if normalizers is not None:
                    turns[index].log_normalizer.append(normalizers[row])
                if stopped[row]:
                    turns[index].ended, turns[index].stop_id = True, int(tokens[row])
                else:
                    turns[index].answer.append(int(tokens[row]))
            done |= stopped
            if bool(done.all()) or step == limit - 1:
                break
            if done.float().mean() > 0.2:  # drop finished rows from the batch
                keep = (~done).nonzero()[:, 0]
                state, active, tokens, done = state.select(keep), active[keep], tokens[keep], done[keep]
            last, taps = self.forward.step(tokens, state)
            if record:
                half_taps, half_final = taps.half(), last.half()
                for row, index in enumerate(active.tolist()):
                    if not done[row]:
                        turns[index].taps.append(half_taps[row : row + 1])
                        turns[index].final.append(half_final[row : row + 1])
        return turns

    def _prefill(self, prompts: list[list[int]], limit: int, turns: list[Turn] | None) -> tuple[Any, Tensor]:
        """The state after all prompts, and the last hidden rows [B, d]. Equal neighbours are run once."""
        distinct: list[list[int]] = []  # the first of each run of equal prompts
        source = []
        for row, prompt in enumerate(prompts):
            if not row or prompt != prompts[row - 1]:
                distinct.append(prompt)
            source.append(len(distinct) - 1)
        filled = self.forward.prefill(distinct, limit, turns is not None)
        for turn, index in zip(turns or (), source, strict=False):
            final, taps = filled.rows[index]
            turn.final.append(final)
            turn.taps.append(taps)
        twins = torch.tensor(source)
        return filled.state if len(distinct) == len(prompts) else filled.state.select(twins), filled.last[twins]

    def _sample(self, logits: Tensor, temperatures: Tensor) -> Tensor:
        top, ids = logits.topk(self.settings.top_k, -1)
        probs = (top / temperatures.clamp(min=1e-3)[:, None]).softmax(-1)
        drawn = torch.multinomial(probs, 1, generator=self.generator)[:, 0]
        drawn = torch.where(temperatures == 0, torch.zeros_like(drawn), drawn)
        return ids.gather(1, drawn[:, None])[:, 0]


class Turn:
    """One generated turn: tokens before the stop token, and the rows recorded while running it."""

    def __init__(self) -> None:
        self.answer: list[int] = []
        self.ended = False
        self.stop_id = -1
        self.taps: list[Tensor] = []
        self.final: list[Tensor] = []
        self.log_normalizer: list[float] = []


def _padded(rows: list[Tensor], length: int) -> Tensor:
    joined = torch.cat(rows)[:length]
    missing = length - joined.shape[0]
    return torch.cat([joined, joined.new_zeros(missing, joined.shape[1])]) if missing else joined


def without_loop(answer: list[int], gram: int = 10) -> int:
    """Length of `answer` before its third copy of the same `gram` tokens begins: loops teach nothing and flatter."""
    seen: dict[tuple[int, ...], int] = {}
    for end in range(gram, len(answer) + 1):
        key = tuple(answer[end - gram : end])
        seen[key] = seen.get(key, 0) + 1
        if seen[key] >= 3:
            return end - gram
    return len(answer)
