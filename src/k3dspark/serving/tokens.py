"""Text, single tokens and chats of one tokenizer, as the HTTP answers show them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from k3dspark.embedded.pair import ModelPair
from k3dspark.errors import BadInput
from k3dspark.target.loading import conversation_ids


class Tokens:
    """The tokenizer of a pair. Encoding may take a while for a long prompt: call it away from the event loop."""

    def __init__(self, pair: ModelPair) -> None:
        self._pair = pair
        self._of_char = {char: byte for byte, char in byte_alphabet().items()}

    def text(self, token_ids: Sequence[int]) -> str:
        return self._pair.text(token_ids)

    def encode(self, text: str) -> list[int]:
        """Ids of a text to be continued. An empty text is the tokenizer's own beginning, where it has one."""
        ids = self._pair.raw_ids(text)
        begin = self._pair.tokenizer.bos_token_id
        return [begin] if not ids and isinstance(begin, int) else ids

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of a conversation in the target's template, up to where the answer begins."""
        if not self._pair.tokenizer.chat_template:
            raise BadInput(
                f"{self._pair.name} has no chat template",
                "its tokenizer does not say how turns are written",
                "use /v1/completions",
            )
        try:
            return conversation_ids(self._pair.tokenizer, messages)
        except Exception as error:  # a template raises what it likes, for example on the order of roles
            raise BadInput("the chat template refuses these messages", str(error), "correct the roles") from error

    def name(self, token_id: int) -> str:
        """One token as text; one that is part of a character as bytes:\\xf0\\x9f, so that no two look alike."""
        text = self._decoded(token_id)
        if "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes_of(token_id))

    def bytes_of(self, token_id: int) -> list[int]:
        """The bytes of one token: those of its text, or its own when it is part of a character."""
        return list(_bytes_of(self, token_id))

    def _decoded(self, token_id: int) -> str:
        return str(self._pair.tokenizer.decode([token_id], clean_up_tokenization_spaces=False))

    def _raw(self, token_id: int) -> bytes:
        piece = self._pair.tokenizer.convert_ids_to_tokens(token_id)
        if isinstance(piece, str):
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):  # byte fallback
                return bytes([int(piece[3:5], 16)])
            name = self._decoded(token_id)
            if "\ufffd" in name and all(char in self._of_char for char in piece):
                return bytes(self._of_char[char] for char in piece)
        return self._decoded(token_id).encode("utf-8", "replace")


@lru_cache(maxsize=65536)
def _bytes_of(tokens: Tokens, token_id: int) -> bytes:
    return tokens._raw(token_id)


def byte_alphabet() -> dict[int, str]:
    """How byte-level tokenizers spell a byte: printable Latin-1 as itself, the rest from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
