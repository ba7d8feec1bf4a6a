"""What clients send: the OpenAI request bodies, with the sampling fields that vLLM added to them.

Fields that would change the answer and are not implemented are refused, not ignored; unknown ones are ignored, as
clients send many.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictInt, field_validator


def _encodable(text: str) -> str:
    """JSON can spell half a surrogate pair, which is no text."""
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError("the text has a lone surrogate, which no encoding can hold")
    return text


Text = Annotated[str, Field(strict=True), AfterValidator(_encodable)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
# Bounds that no one means to pass, but beyond which fp32 logits overflow, and with them everybody's batch.
Temperature = Annotated[float, Field(strict=True, ge=0, le=100, allow_inf_nan=False)]
Repetition = Annotated[float, Field(strict=True, ge=0.01, le=100, allow_inf_nan=False)]
Penalty = Annotated[float, Field(strict=True, ge=-2, le=2, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=1)]
TokenIds = list[StrictInt]


class Schema(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class StreamOptions(Schema):
    include_usage: StrictBool = Field(False, description="Send usage and statistics in a last chunk without choices.")


class GenerationRequest(Schema):
    """What both endpoints share."""

    model: Text | None = Field(None, description="The served model's id; may be left out.")
    n: Count = Field(1, description="Answers for each prompt.")
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    stop: Text | list[Text] | None = Field(None, description="Strings that end the answer; not part of it.")
    temperature: Temperature | None = Field(None, description="0 is greedy.")
    top_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Number] | None = Field(None, description="Token id to a value from -100 to 100.")
    seed: StrictInt | None = Field(None, description="The same seed gives the same answer; choice i uses seed + i.")
    user: Text | None = None
    # Beyond OpenAI's
    top_k: Annotated[int, Field(strict=True, ge=-1)] | None = Field(None, description="0 or -1 is off.")
    min_p: Annotated[float, Field(strict=True, ge=0, lt=1)] | None = None
    repetition_penalty: Repetition | None = Field(None, description="1 is off.")
    stop_token_ids: TokenIds | None = None
    ignore_eos: StrictBool | None = Field(None, description="Go on past the end of the answer, for measurements.")
    cache_salt: Annotated[Text, Field(min_length=1)] | None = Field(
        None, description="Cached prefixes are shared only among requests with the same one."
    )
    return_token_ids: StrictBool | None = Field(None, description="Also send the ids of the prompt and of the answer.")
    return_tokens_as_token_ids: StrictBool | None = Field(None, description="Name tokens in logprobs token_id:N.")

    @field_validator("n", mode="before")
    @classmethod
    def _one_by_default(cls, value: object) -> object:
        return 1 if value is None else value


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Text | list[Text] | TokenIds | list[TokenIds] = Field(description="Text or token ids to go on.")
    max_tokens: Count | None = Field(None, description="16 when not given.")
    logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    echo: StrictBool | None = None
    suffix: Text | None = None
    best_of: StrictInt | None = None


class TextPart(Schema):
    type: Literal["text"]
    text: Text


class Message(Schema):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    @property
    def turn(self) -> dict[str, str]:
        """As templates take it; "developer" is OpenAI's newer name for a system message, which they do not know."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.text}


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Count | None = Field(None, description="Deprecated by OpenAI for max_completion_tokens; the same here.")
    max_completion_tokens: Count | None = Field(None, description="As many as fit when not given.")
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None


class TokenizeRequest(Schema):
    """POST /tokenize: a text, or a conversation as the template writes it."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None


class DetokenizeRequest(Schema):
    """POST /detokenize."""

    model: Text | None = None
    tokens: TokenIds
