"""SGLang: its own /generate takes and gives token ids, which its OpenAI endpoints do not."""

from __future__ import annotations

from typing import Any

from k3dspark.acceptance.asking import Answer, Question, Scores, Source
from k3dspark.acceptance.http import Refused
from k3dspark.acceptance.server import Server


class SGLangServer(Server):
    """Completions over /generate, conversations over the OpenAI endpoint."""

    def _complete(self, question: Question) -> Answer:
        prompt = {"input_ids": list(question.token_ids)} if question.token_ids is not None else {"text": question.text}
        sampling: dict[str, Any] = {
            "temperature": question.sampling.temperature,
            "top_p": question.sampling.top_p,
            "max_new_tokens": question.max_tokens,
            "stop": list(question.stop) or None,
            "ignore_eos": question.ignore_end,
            "sampling_seed": question.sampling.seed,
        }
        body = {
            **prompt,
            "sampling_params": {key: value for key, value in sampling.items() if value is not None},
            "return_logprob": question.top is not None,
            "top_logprobs_num": question.top or 0,
            **({"extra_key": question.salt} if question.salt and "extra_key" not in self.dropped else {}),
        }
        try:
            answer = dict(self.wire.post("/generate", body))
        except Refused as refused:
            if "extra_key" in refused.text and "extra_key" in body:
                self.dropped.add("extra_key")
                return self._complete(question)
            raise self._refusal("/generate", refused) from refused
        return self._native(answer)

    def _native(self, answer: dict[str, Any]) -> Answer:
        meta = answer.get("meta_info") or {}
        chosen = meta.get("output_token_logprobs") or []  # [log-probability, id, text] each
        best = meta.get("output_top_logprobs") or []
        told = answer.get("output_ids")
        text = str(answer.get("text") or "")
        if isinstance(told, list):
            ids, source = tuple(int(token) for token in told), Source.IDS
        elif chosen:
            ids, source = tuple(int(entry[1]) for entry in chosen), Source.LOGPROBS
        else:
            ids, source = self._ids(None, [], text)
        scores: tuple[Scores, ...] = ()
        if chosen and len(chosen) == len(best) == len(ids):
            scores = tuple(
                Scores(float(entry[0]), tuple((int(token), float(value)) for value, token, *_ in tops or ()))
                for entry, tops in zip(chosen, best, strict=True)
            )
        reason = meta.get("finish_reason") or {}
        return Answer(
            token_ids=ids,
            text=text,
            finish=str(reason.get("type", "length") if isinstance(reason, dict) else reason),
            source=source,
            scores=scores,
            prompt_tokens=meta.get("prompt_tokens"),
            cached=meta.get("cached_tokens"),
        )
