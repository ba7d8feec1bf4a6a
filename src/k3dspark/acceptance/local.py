"""A local engine as a generator: a target in this process, with its draft or without."""

from __future__ import annotations

from collections.abc import Sequence

from k3dspark.acceptance.asking import Answer, Question, Scores, Source
from k3dspark.decoding import Capacity, Engine, FinishReason, Request, SamplingParams, Scheduler
from k3dspark.embedded.pair import ModelPair
from k3dspark.errors import BadInput, EngineFault
from k3dspark.target.loading import conversation_ids


class Local:
    """`with_draft=False` decodes plainly through the same code. The draft, when there is one, drafts full blocks."""

    kind = "local"
    has_cache: bool | None = False

    def __init__(
        self, pair: ModelPair, *, with_draft: bool, concurrency: int = 1, exact: bool = True,
        scheduler: Scheduler | None = None,
    ) -> None:  # fmt: skip
        if with_draft and pair.draft is None:
            raise BadInput(f"{pair.name} has no draft here", "none was given", "name its draft")
        draft = pair.draft if with_draft else None
        self._pair = pair
        self._engine = Engine(
            pair.target, draft, scheduler, exact=exact, decode=pair.text, capacity=Capacity(concurrency)
        )
        dtype = str(pair.dtype).removeprefix("torch.")
        self.name = f"{pair.name} in this process, {dtype}, {'with its draft' if with_draft else 'without a draft'}"
        self.context: int | None = pair.target.max_positions
        self.chats = bool(pair.tokenizer.chat_template)

    def codec(self) -> PairCodec:
        return PairCodec(self._pair)

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        requests = [self._submit(question) for question in questions]
        try:
            while not self._engine.idle:
                self._engine.step()
        except BaseException:
            self._engine.abort(
                EngineFault("the comparison was ended", "a step failed or was interrupted", "run it again")
            )
            raise
        return [self._answer(request, question) for request, question in zip(requests, questions, strict=True)]

    def close(self) -> None:
        pass

    def _submit(self, question: Question) -> Request:
        params = SamplingParams(
            max_new_tokens=question.max_tokens,
            stop_token_ids=() if question.ignore_end else self._pair.stop_ids,
            stop_strings=question.stop,
            temperature=question.sampling.temperature,
            top_p=question.sampling.top_p,
            seed=question.sampling.seed,
            logprobs=question.top,
        )
        if question.token_ids is not None:
            return self._engine.submit(question.token_ids, params)
        if question.text is not None:
            return self._engine.submit(self._pair.raw_ids(question.text), params)
        turns = [dict(message) for message in question.messages or ()]
        return self._engine.submit(conversation_ids(self._pair.tokenizer, turns), params)

    def _answer(self, request: Request, question: Question) -> Answer:
        if request.error is not None:
            raise request.error
        text = self._pair.text(request.new_ids)
        found = [at for stop in question.stop if (at := text.find(stop)) >= 0]
        return Answer(
            token_ids=tuple(request.new_ids),
            text=text[: min(found)] if found else text,
            finish="stop" if request.finish_reason is FinishReason.STOP else "length",
            source=Source.IDS,
            scores=tuple(Scores(entry.logprob, entry.best) for entry in request.logprobs),
            prompt_tokens=len(request.prompt_ids),
            prompt_ids=request.prompt_ids,
        )


class PairCodec:
    """The tokenizer that a local model came with."""

    def __init__(self, pair: ModelPair) -> None:
        self._pair = pair
        self.origin = f"the tokenizer of {pair.name}"

    def encode(self, text: str) -> list[int]:
        return self._pair.raw_ids(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._pair.text(token_ids)

    def id_of(self, name: str) -> int | None:
        from k3dspark.acceptance.codec import unique_names

        if not hasattr(self, "_names"):
            tokenizer = self._pair.tokenizer
            self._names = unique_names(tokenizer.decode([i]) for i in range(len(tokenizer)))
        return self._names.get(name)
