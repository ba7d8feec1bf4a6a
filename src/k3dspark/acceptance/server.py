"""Any OpenAI-compatible server as a generator: ours, vLLM, and those that speak the same fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from k3dspark.acceptance.asking import Answer, Codec, Question, Scores, Source
from k3dspark.acceptance.codec import ServerCodec, numbered
from k3dspark.acceptance.http import Refused, Wire
from k3dspark.errors import BadInput, EngineFault

# Extensions that a server may not know; one that names them in a refusal is asked again without.
OPTIONAL = (
    "return_token_ids", "return_tokens_as_token_ids", "cache_salt", "ignore_eos", "top_k", "min_p",
    "repetition_penalty", "top_logprobs", "logprobs", "seed",
)  # fmt: skip


class Server:
    """A server at `url`. `tokenizer` is used where the server gives neither ids nor names of tokens."""

    has_cache: bool | None = None
    chats = True

    def __init__(self, wire: Wire, model: str, kind: str, context: int | None, concurrency: int) -> None:
        self.wire, self.model, self.kind, self.context = wire, model, kind, context
        self.name = f"{model} at {wire.root} ({kind})"
        self.tokenizer: Codec | None = None
        self.dropped: set[str] = set()  # fields that this server refused
        self._concurrency = concurrency

    def codec(self) -> Codec | None:
        def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
            try:
                return dict(self.wire.post(path, {"model": self.model, **body}))
            except Refused as error:
                raise BadInput(f"{self.wire.root}{path} refuses", str(error), "pass --tokenizer DIR") from error

        found = ServerCodec(post, f"{self.wire.root}/tokenize")
        try:
            found.encode("a")
        except BadInput:
            return None
        return found

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        with ThreadPoolExecutor(self._concurrency, "k3dspark-accept") as threads:
            return list(threads.map(self._one, questions))

    def close(self) -> None:
        self.wire.close()

    def _one(self, question: Question) -> Answer:
        if question.messages is not None:
            return self._chat(question)
        return self._complete(question)

    def _complete(self, question: Question) -> Answer:
        prompt = list(question.token_ids) if question.token_ids is not None else question.text
        body = {"prompt": prompt, **self._common(question), "logprobs": question.top}
        answer = self._post("/v1/completions", body)
        choice = self._choice(answer)
        logprobs = choice.get("logprobs") or {}
        names = list(logprobs.get("tokens") or ())
        scores = scores_of(names, logprobs.get("token_logprobs"), logprobs.get("top_logprobs"), self._id)
        return self._answer(answer, choice, str(choice.get("text") or ""), names, scores)

    def _chat(self, question: Question) -> Answer:
        body = {
            "messages": [dict(message) for message in question.messages or ()],
            **self._common(question),
            "logprobs": question.top is not None,
            "top_logprobs": question.top,
        }
        answer = self._post("/v1/chat/completions", body)
        choice = self._choice(answer)
        entries = (choice.get("logprobs") or {}).get("content") or []
        names = [str(entry["token"]) for entry in entries]
        best = [{str(top["token"]): top["logprob"] for top in entry.get("top_logprobs") or ()} for entry in entries]
        scores = scores_of(names, [entry["logprob"] for entry in entries], best, self._id)
        return self._answer(answer, choice, str((choice.get("message") or {}).get("content") or ""), names, scores)

    def _common(self, question: Question) -> dict[str, Any]:
        """Fields of both endpoints. Sampling is spelt out: a server may take defaults from the model's directory."""
        return {
            "model": self.model,
            "max_tokens": question.max_tokens,
            "temperature": question.sampling.temperature,
            "top_p": question.sampling.top_p,
            "seed": question.sampling.seed,
            "stop": list(question.stop) or None,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": question.ignore_end or None,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "cache_salt": question.salt,
        }

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        while True:
            sent = {key: value for key, value in body.items() if value is not None and key not in self.dropped}
            try:
                return dict(self.wire.post(path, sent))
            except Refused as refused:
                named = {field for field in OPTIONAL if field in sent and field in refused.text}
                if not named or refused.status in (401, 403, 404):
                    raise self._refusal(path, refused) from refused
                self.dropped |= named | ({"top_logprobs"} if "logprobs" in named else set())

    def _refusal(self, path: str, refused: Refused) -> BadInput:
        remedy = "check --api-key" if refused.status in (401, 403) else "change what is asked, or how the server runs"
        if "context" in refused.text or "maximum" in refused.text:
            remedy = "pass smaller --lengths, or fewer --max-new-tokens"
        return BadInput(f"{self.wire.root}{path} refuses with status {refused.status}", refused.text, remedy)

    def _choice(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        choices = answer.get("choices")
        if not choices or not isinstance(choices[0], dict):
            raise EngineFault(f"{self.name} gave no answer", f"it sent {str(answer)[:200]}", "read the server's log")
        return choices[0]

    def _answer(
        self, answer: Mapping[str, Any], choice: Mapping[str, Any], text: str, names: list[str], scores: list[Scores]
    ) -> Answer:
        told = choice.get("token_ids")
        ids, source = self._ids(told, names, text)
        usage = answer.get("usage") or {}
        prompt_ids = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
        return Answer(
            token_ids=ids,
            text=text,
            finish=str(choice.get("finish_reason") or "length"),
            source=source,
            scores=tuple(scores) if len(scores) == len(ids) else (),
            prompt_tokens=usage.get("prompt_tokens"),
            prompt_ids=tuple(prompt_ids) if prompt_ids else None,
            cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        )

    def _ids(self, told: Any, names: list[str], text: str) -> tuple[tuple[int, ...], Source]:
        if isinstance(told, list):
            return tuple(int(token) for token in told), Source.IDS
        found = [self._id(name) for name in names]
        if names and None not in found:
            return tuple(token for token in found if token is not None), Source.LOGPROBS
        if self.tokenizer is None:
            raise BadInput(
                f"{self.name} gives no token ids",
                "neither ids nor log-probabilities that name them, and no tokenizer is at hand to read its text",
                "pass --tokenizer DIR",
            )
        return tuple(self.tokenizer.encode(text)), Source.TEXT

    def _id(self, name: str) -> int | None:
        number = numbered(name)
        return number if number is not None or self.tokenizer is None else self.tokenizer.id_of(name)


def scores_of(names: Sequence[str], chosen: Any, best: Any, id_of: Callable[[str], int | None]) -> list[Scores]:
    """Scores from parallel lists of names, log-probabilities and {name: log-probability}; empty when incomplete."""
    if not names or not chosen or not best or not len(names) == len(chosen) == len(best):
        return []
    result = []
    for value, tops in zip(chosen, best, strict=True):
        known = [
            (token, float(logprob)) for name, logprob in (tops or {}).items() if (token := id_of(name)) is not None
        ]
        if value is None:
            return []
        result.append(Scores(float(value), tuple(sorted(known, key=lambda pair: -pair[1]))))
    return result


def open_server(
    url: str, *, model: str | None, api_key: str | None, timeout_seconds: float, concurrency: int
) -> Server:
    """Ask a server who it is. Raises `EngineFault` when it does not answer, `BadInput` when it is no such server."""
    from k3dspark.acceptance.sglang import SGLangServer

    wire = Wire(url, api_key, timeout_seconds, concurrency)
    try:
        entry = _served(wire, model)
    except BaseException:
        wire.close()
        raise
    owner = str(entry.get("owned_by", ""))
    kind = owner if owner in ("k3dspark", "vllm", "sglang") else "openai"
    context = entry.get("max_model_len")
    made = SGLangServer if kind == "sglang" else Server
    return made(wire, str(entry["id"]), kind, int(context) if context else None, concurrency)


def _served(wire: Wire, model: str | None) -> dict[str, Any]:
    """The entry of a model in what the server lists; the first one for None."""
    try:
        models = wire.get("/v1/models")["data"]
        return dict(next(m for m in models if model is None or m["id"] == model))
    except Refused as refused:
        raise BadInput(
            f"{wire.root}/v1/models refuses with status {refused.status}",
            refused.text,
            "check the address and --api-key",
        ) from refused
    except StopIteration:
        raise BadInput(
            f"{wire.root} does not serve {model}",
            f"it serves {', '.join(str(m['id']) for m in models)}",
            "name another",
        ) from None
    except (LookupError, TypeError) as error:
        raise BadInput(f"{wire.root} lists no models", str(error), "pass an OpenAI-compatible server") from error
