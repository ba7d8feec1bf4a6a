"""Tokenizers: of a directory (its tokenizer.json, without torch), or of a server that tokenizes for its clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from k3dspark.errors import BadInput

_ID = "token_id:"  # how vLLM names a token when asked to name ids


class FileCodec:
    """The tokenizer.json of a model directory."""

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer

        file = directory / "tokenizer.json" if directory.is_dir() else directory
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust library raises bare exceptions
            raise BadInput(f"cannot read {file}", str(error), "pass a directory that has a tokenizer.json") from error
        self.origin = str(file)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def id_of(self, name: str) -> int | None:
        return self._names.get(name, numbered(name))

    @cached_property
    def _names(self) -> dict[str, int]:
        decode = self._tokenizer.decode
        texts = (decode([i], skip_special_tokens=False) for i in range(self._tokenizer.get_vocab_size()))
        return unique_names(texts)


class ServerCodec:
    """A server's /tokenize and /detokenize, as vLLM and SGLang have them."""

    def __init__(self, post: Callable[[str, dict[str, Any]], dict[str, Any]], origin: str) -> None:
        self._post, self.origin = post, origin

    def encode(self, text: str) -> list[int]:
        found = self._post("/tokenize", {"prompt": text}).get("tokens")
        if not isinstance(found, list):
            raise BadInput(f"{self.origin} gives no tokens", "its answer has no list of them", "pass --tokenizer DIR")
        return [int(token) for token in found]

    def decode(self, token_ids: Sequence[int]) -> str:
        answer = self._post("/detokenize", {"tokens": list(token_ids)})
        return str(answer.get("prompt", answer.get("text", "")))

    def id_of(self, name: str) -> int | None:
        return numbered(name)


def unique_names(texts: Any) -> dict[str, int]:
    """Name to id of every token whose name no other token has."""
    names: dict[str, int] = {}
    double: set[str] = set()
    for token, text in enumerate(texts):
        if text in names:
            double.add(text)
        names[text] = token
    return {name: token for name, token in names.items() if name not in double and "\ufffd" not in name}


def numbered(name: str) -> int | None:
    """The id in a name that vLLM gives a token when asked to name ids; None for any other name."""
    number = name.removeprefix(_ID)
    return int(number) if number != name and number.isdigit() else None
