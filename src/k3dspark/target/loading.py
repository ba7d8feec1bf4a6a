"""Opening a model directory as a `Target`, and its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from k3dspark.checkpoint.files import no_model_at
from k3dspark.checkpoint.kimi_k3 import is_kimi_k3
from k3dspark.errors import BadInput
from k3dspark.model.packed import native_bf16
from k3dspark.target.llama import LlamaTarget
from k3dspark.target.protocol import Target
from k3dspark.target.weights import load_llama, read_config, unsupported_reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from k3dspark.target.kimi_k3_model import TapStream
    from k3dspark.target.transformers_target import TransformersTarget

DType = Literal["auto", "float32", "bfloat16", "int8"]
Backend = Literal["auto", "lean", "transformers"]


def open_target(
    directory: str | Path,
    dtype: DType = "auto",
    tap_layer_ids: Sequence[int] = (),
    exact: bool = True,
    backend: Backend = "auto",
    trust_remote_code: bool = False,
    tap_stream: TapStream = "prefix",
) -> Target:
    """The causal language model of a local directory (config.json and safetensors), ready to verify.

    `dtype` "auto" is bfloat16 where this CPU multiplies it in hardware, else float32; "int8" rounds the matrices of the
    lean forward to 8 bits (`model.packed.quantised`) and computes in fp32. `backend` "auto" takes the lean
    forward for Llama, SmolLM2, Qwen2 and Qwen3, our own for Kimi K3, and transformers for everything else; only the
    lean one is exact (`exact=True`: bitwise independent of how tokens are split into calls). `tap_layer_ids` are
    0-based layers whose raw output is tapped; the last layer cannot be tapped through transformers, because it reports
    it after the final norm. `tap_stream` "attn_res" taps what the next layer reads instead: Kimi K3 only.

    Raises `BadInput` for an unknown directory, unreadable or foreign weights, a model that is not a causal language
    model, and tap layers that the model does not have.
    """
    path = model_directory(directory)
    config = read_config(path)
    int8, width = dtype == "int8", precision(dtype)
    if is_kimi_k3(config) and backend != "transformers":
        if int8:
            raise BadInput("int8 needs the lean forward", f"{path} is a Kimi K3", "take another --dtype")
        return _open_kimi_k3(path, config, width, tap_layer_ids, tap_stream)
    if tap_stream != "prefix":
        raise BadInput(
            f"the draft taps the stream {tap_stream}, which {path} does not have",
            "only Kimi K3 mixes its residual stream over depth",
            "use the draft with the target it was trained with",
        )
    reason = unsupported_reason(config)
    if int8 and (backend == "transformers" or reason is not None):
        raise BadInput("int8 needs the lean forward", reason or "transformers was asked for", "take another --dtype")
    if backend == "lean" or (backend == "auto" and reason is None):
        return LlamaTarget(load_llama(path, width), tap_layer_ids, exact=exact, int8=int8)
    if backend not in ("auto", "transformers"):
        raise BadInput(f"unknown backend {backend!r}", "it is auto, lean or transformers", "correct the argument")
    return _open_transformers(path, config, width, tap_layer_ids, trust_remote_code)


def load_tokenizer(directory: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a local model directory. Raises `BadInput` when there is none or it cannot be read."""
    from transformers import AutoTokenizer, PreTrainedConfig

    path = model_directory(directory)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    if (path / "config.json").is_file() and is_kimi_k3(read_config(path)):
        options["config"] = PreTrainedConfig()  # or transformers would look for a model type it does not know, and warn
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, **options)
    except Exception as error:  # transformers raises many types for a bad tokenizer directory
        raise BadInput(
            f"the tokenizer in {path} cannot be loaded",
            _first_line(error),
            "fetch tokenizer.json and tokenizer_config.json of the model",
        ) from error
    return tokenizer


def conversation_ids(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Mapping[str, str]]) -> list[int]:
    """Ids of a conversation in the tokenizer's chat template, up to where the next answer begins.

    The template, which must be there, raises what it likes, for example on the order of roles.
    """
    text = tokenizer.apply_chat_template([dict(turn) for turn in turns], tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def model_directory(directory: str | Path) -> Path:
    """The path as given. Raises `BadInput` unless it is a directory."""
    path = Path(directory).expanduser()
    if not path.is_dir():
        raise no_model_at(path)
    return path


def _open_kimi_k3(
    path: Path, config: dict[str, Any], dtype: torch.dtype, tap_layer_ids: Sequence[int], stream: TapStream
) -> Target:
    from k3dspark.target.kimi_k3 import KimiK3Target
    from k3dspark.target.kimi_k3_loading import load_kimi_k3

    return KimiK3Target(load_kimi_k3(path, config, dtype), tap_layer_ids, stream)


def _open_transformers(
    path: Path, config: dict[str, Any], dtype: torch.dtype, tap_layer_ids: Sequence[int], trust_remote_code: bool
) -> TransformersTarget:
    from transformers import AutoModelForCausalLM

    from k3dspark.target.transformers_target import TransformersTarget

    _require_causal(path, config)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:  # transformers, safetensors and torch raise many types here
        raise BadInput(
            f"transformers cannot load {path}", _first_line(error), "check that the model is a complete causal model"
        ) from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would go on with random values
        raise BadInput(
            f"{len(missing)} tensors are missing in {path}, such as {missing[0]}",
            "the weights are incomplete or belong to another model",
            "fetch the model again",
        )
    return TransformersTarget(model, tap_layer_ids)


def _require_causal(path: Path, config: dict[str, Any]) -> None:
    architectures = config.get("architectures") or []
    causal = ("CausalLM", "LMHeadModel", "ForConditionalGeneration", "ImageTextToText")
    foreign = architectures and not any(name.endswith(causal) for name in architectures)
    if config.get("is_encoder_decoder") or foreign:
        raise BadInput(
            f"{path} is not a causal language model",
            f"its architecture is {', '.join(architectures) or 'an encoder-decoder'}",
            "choose a decoder-only model",
        )


def precision(dtype: str) -> torch.dtype:
    """What a `DType` means on this machine. Raises `BadInput`."""
    if dtype == "auto":
        return torch.bfloat16 if native_bf16() else torch.float32
    if dtype not in ("float32", "bfloat16", "int8"):
        raise BadInput(f"unknown dtype {dtype!r}", "it is auto, float32, bfloat16 or int8", "correct the argument")
    return torch.bfloat16 if dtype == "bfloat16" else torch.float32  # int8 is rounded from fp32


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
