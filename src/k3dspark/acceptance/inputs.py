"""What both sides are asked: the built-in set at chosen lengths, or the user's file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from k3dspark.acceptance import texts
from k3dspark.acceptance.asking import Codec, Question
from k3dspark.errors import BadInput

CHATS = 5
SAMPLE = 4000  # characters by which a kind's tokens per character are guessed
CHARACTERS_PER_TOKEN = 3.0  # where nobody can say; the report has what the server counted


@dataclass(frozen=True)
class Input:
    """A named question; `group` is its length, or "chat", "file", "stop"."""

    name: str
    group: str
    question: Question

    @property
    def by_ids(self) -> bool:
        """Asked as token ids: no template and no tokenizer stands between the two sides."""
        return self.question.token_ids is not None


@dataclass(frozen=True)
class InputSet:
    """Inputs, and what has to be said about them."""

    inputs: tuple[Input, ...]
    notes: tuple[str, ...] = ()
    lengths: tuple[int, ...] = field(default=())  # tokens of the prompts, by length that was kept


def parse_lengths(text: str) -> tuple[int, ...]:
    """Tokens from "1K,32K,500"; K is 1024. Raises `BadInput`."""
    lengths = []
    for part in text.split(","):
        number = part.strip().upper().removesuffix("K")
        if not number.isdecimal() or not 1 <= int(number) <= 2**24:
            raise BadInput(f"--lengths {text}", f"{part!r} is no number of tokens", "for example --lengths 1K,32K,128K")
        lengths.append(int(number) * (1024 if part.strip().upper().endswith("K") else 1))
    return tuple(sorted(set(lengths)))


def fitting(lengths: Sequence[int], context: int | None, new_tokens: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The lengths that a context of so many tokens takes, and what was shortened or left out."""
    if context is None:
        return tuple(lengths), ("neither side says how long its context is: lengths are taken as they are",)
    room = context - new_tokens
    if room < 16:
        raise BadInput(
            f"a context of {context} tokens has no room", f"{new_tokens} new tokens are asked for",
            "pass fewer --max-new-tokens",
        )  # fmt: skip
    kept = [n for n in lengths if n <= room]
    over = [n for n in lengths if n > room]
    notes = []
    if over:
        rest = over
        if not kept or room > 1.1 * kept[-1]:
            kept.append(room)
            notes.append(
                f"{short(over[0])} is beyond the context of {context} tokens: {room} instead, the most that fits"
            )
            rest = over[1:]
        if rest:
            notes.append(f"left out, beyond the context of {context} tokens: {', '.join(map(short, rest))}")
    return tuple(kept), tuple(notes)


def short(tokens: int) -> str:
    """1024 as 1K; what is no multiple, as it is."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def built_in(lengths: Sequence[int], per_length: int, new_tokens: int, codec: Codec | None, *, chat: bool) -> InputSet:
    """`per_length` texts at every length, each of another kind as long as there are kinds; then conversations.

    With a tokenizer the prompts are ids, exactly so many, and the answer goes on past its end so that every input
    brings as many tokens. Without one they are texts of about that length.
    """
    kinds = list(texts.KINDS)
    inputs, notes = [], []
    for length in lengths:
        for number in range(per_length):
            kind, seed = kinds[number % len(kinds)], length * 100 + number // len(kinds)
            name = f"{short(length)} {kind}" + (f" {number // len(kinds) + 1}" if number >= len(kinds) else "")
            if codec is not None:
                question = Question(
                    token_ids=exact_ids(kind, seed, length, codec), max_tokens=new_tokens, ignore_end=True
                )
            else:
                size = int(length * CHARACTERS_PER_TOKEN)
                question = Question(text=texts.text(kind, seed, size)[:size], max_tokens=new_tokens, ignore_end=True)
            inputs.append(Input(name, short(length), question))
    if codec is None:
        notes.append("no tokenizer is at hand: prompts are texts of about the length, tokenized by each side")
    if chat:
        for kind in kinds[:CHATS]:
            turns = ({"role": "user", "content": texts.CHATS[kind]},)
            inputs.append(Input(f"chat {kind}", "chat", Question(messages=turns, max_tokens=new_tokens)))
    else:
        notes.append("a side has no chat template: conversations are not compared")
    return InputSet(tuple(inputs), tuple(notes), tuple(lengths))


def exact_ids(kind: str, seed: int, length: int, codec: Codec) -> tuple[int, ...]:
    """The first `length` ids of a kind's text."""
    sample = texts.text(kind, seed, SAMPLE)
    per_token = len(sample) / max(len(codec.encode(sample)), 1)
    characters = int(length * per_token * 1.1) + 200
    while True:
        ids = codec.encode(texts.text(kind, seed, characters))
        if len(ids) >= length:
            return tuple(ids[:length])
        characters *= 2


def read_file(path: Path, new_tokens: int, codec: Codec | None) -> InputSet:
    """One input a line: a text, or JSON with `prompt`, `messages` or `token_ids`, and `name`, `max_tokens`, `stop`.

    A text becomes ids when a tokenizer is at hand. Raises `BadInput` naming the line that is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read {path}", str(error), "pass a UTF-8 file with one input a line") from error
    inputs: list[Input] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            given = _line(line, f"{path}, line {number}", number, new_tokens, codec)
            if any(other.name == given.name for other in inputs):  # a report names inputs by their names
                given = replace(given, name=f"{given.name}, line {number}")
            inputs.append(given)
    if not inputs:
        raise BadInput(f"{path} has no inputs", "there is nothing to ask", "write one prompt a line")
    return InputSet(tuple(inputs))


def _line(line: str, where: str, number: int, new_tokens: int, codec: Codec | None) -> Input:
    entry: dict[str, object] = {"prompt": line}
    if line.lstrip().startswith("{"):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise BadInput(where, f"not JSON: {error}", "correct the line") from error
    given = [key for key in ("prompt", "messages", "token_ids") if key in entry]
    if len(given) != 1:
        raise BadInput(where, "one of prompt, messages and token_ids is needed", 'for example {"prompt": "…"}')
    tokens, stop = entry.get("max_tokens", new_tokens), entry.get("stop", [])
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else (None,)
    if type(tokens) is not int or tokens < 1 or not all(isinstance(s, str) and s for s in stops):
        raise BadInput(where, "max_tokens is a whole number above 0, stop a list of texts", "correct the line")
    common = {"max_tokens": tokens, "stop": stops}
    value = entry[given[0]]
    name = str(entry.get("name", f"line {number}"))
    if given[0] == "prompt" and isinstance(value, str) and value:
        asked = {"text": value} if codec is None else {"token_ids": tuple(codec.encode(value))}
        return Input(name, "file", Question(**asked, **common))  # type: ignore[arg-type]
    if given[0] == "token_ids" and isinstance(value, list) and value and all(type(t) is int and t >= 0 for t in value):
        return Input(name, "file", Question(token_ids=tuple(value), **common))  # type: ignore[arg-type]
    if given[0] == "messages" and isinstance(value, list) and value and all(_turn(turn) for turn in value):
        return Input(name, "file", Question(messages=tuple(value), **common))  # type: ignore[arg-type]
    raise BadInput(where, f"{given[0]} is empty or of the wrong kind", "correct the line")


def _turn(turn: object) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
