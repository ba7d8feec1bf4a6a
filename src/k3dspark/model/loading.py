"""Drafts from and to directories: strict, without pickle, and never with two copies of the weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from k3dspark.checkpoint.files import (
    INDEX_FILE,
    LM_HEAD_FILE,
    MODEL_FILE,
    StoredTensor,
    replacing,
    stored_tensors,
    weight_files,
    write_json,
)
from k3dspark.checkpoint.inventory import (
    EMBEDDING,
    LM_HEAD,
    TensorSpec,
    expected_tensors,
    header_json,
    lm_head_tensor,
)
from k3dspark.checkpoint.rules import require
from k3dspark.errors import BadInput
from k3dspark.model.config import K3DSparkConfig
from k3dspark.model.draft import K3DSparkModel
from k3dspark.model.mapped import MappedFile
from k3dspark.model.rope import Rope

PART = 1 << 24  # numbers copied before their pages are given back
_MISFIT = "config.json and the weights belong to different models, or one is damaged; fetch both again"


def load_draft(
    directory: str | Path,
    config: K3DSparkConfig | None = None,
    target_embed: Tensor | None = None,
    target_lm_head: Tensor | None = None,
    dtype: torch.dtype | None = None,
    mapped: bool = False,
) -> K3DSparkModel:
    """The draft in a directory, ready for inference or training.

    Reads model.safetensors (or its shards) and lm_head.safetensors. What the directory lacks of the embedding and the
    lm_head is taken from the target's tensors [V, d], without a copy where the dtype agrees. `dtype` None keeps the
    stored one. `mapped` leaves tensors of this dtype in the mapped files, for inference: nothing is read before it is
    used, and `pack` gives the pages back. Raises `BadInput` for anything missing, surplus, misshapen or of another
    dtype than config.json says.
    """
    directory = Path(directory)
    config = config or K3DSparkConfig.from_file(directory)
    stored = stored_tensors(weight_files(directory))
    stored_head = stored.pop(LM_HEAD, None)
    specs = expected_tensors(config.mapping())
    if EMBEDDING not in stored and target_embed is not None:
        specs.pop(EMBEDDING, None)
    _require_match(stored, specs)

    files = _Files(mapped)
    tensors = files.read(stored, dtype)
    dtype = dtype or next(t.dtype for t in tensors.values() if t.is_floating_point())
    if EMBEDDING not in tensors:
        tensors[EMBEDDING] = _from_target(target_embed, config, dtype, "embed_tokens")
    head = _head(directory, config, stored_head, files, tensors[EMBEDDING], target_lm_head, dtype)
    if "d2t" in tensors:
        _require_token_ids(tensors["d2t"], config)
        head = head[tensors["d2t"]]

    with torch.device("meta"):
        model = K3DSparkModel(config)
    model.load_state_dict(tensors, strict=True, assign=True)
    model.lm_head = head
    model.files = files.mapped_files
    model.rope = Rope.from_parameters(config.qk_rope_head_dim, config.rope_parameters)  # a real one: it was on meta
    return model


def _require_match(stored: dict[str, StoredTensor], specs: dict[str, TensorSpec]) -> None:
    for name, spec in specs.items():
        if name not in stored:
            why, remedy = "config.json asks for it", _MISFIT
            if name == EMBEDDING:
                why = "config.json asks for it, and no target's embedding was given"
                remedy = "pass the target's embedding (target_embed), or fetch a checkpoint that has its own"
            raise BadInput(f"the tensor {name} is missing from the weights", why, remedy)
        entry = stored[name].entry
        if entry.shape != spec.shape:
            raise BadInput(
                f"the tensor {name} has shape {list(entry.shape)}",
                f"config.json asks for {list(spec.shape)} ({', '.join(spec.terms)})",
                _MISFIT,
            )
        if entry.dtype != spec.dtype:
            raise BadInput(
                f"the tensor {name} has dtype {entry.dtype}",
                f"config.json's torch_dtype asks for {spec.dtype}",
                "correct torch_dtype to what the weights have, or fetch both again",
            )
    surplus = sorted(stored.keys() - specs.keys())
    if surplus:
        more = f" and {len(surplus) - 1} more" if len(surplus) > 1 else ""
        raise BadInput(
            f"the tensor {surplus[0]}{more} has no place in this draft",
            f"it is in {stored[surplus[0]].path.name}, and config.json does not ask for it",
            _MISFIT,
        )


class _Files:
    """Tensors out of safetensors files, never two copies of one: read into memory of their own, or left mapped."""

    def __init__(self, mapped: bool) -> None:
        self._keep = mapped
        self._open: dict[Path, MappedFile] = {}

    @property
    def mapped_files(self) -> tuple[MappedFile, ...]:
        return tuple(self._open.values()) if self._keep else ()

    def read(self, stored: dict[str, StoredTensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
        """By canonical name; floating-point ones in `dtype`, if given."""
        return {name: self._tensor(tensor, dtype) for name, tensor in stored.items()}

    def _tensor(self, stored: StoredTensor, dtype: torch.dtype | None) -> Tensor:
        try:
            if stored.path not in self._open:
                self._open[stored.path] = MappedFile(stored.path)
            file = self._open[stored.path]
            value = file.tensor(stored.entry)
            wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
            if self._keep and wanted == value.dtype:
                return value
            # A copy, not a view of the mapped file: tensors lie there on odd two-byte boundaries.
            copy = torch.empty(value.shape, dtype=wanted)
            for ours, theirs in zip(copy.view(-1).split(PART), value.view(-1).split(PART), strict=True):
                ours.copy_(theirs)
                file.give_back(theirs)
        except (OSError, ValueError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise BadInput(f"{stored.path} cannot be read", reason, "fetch it again") from error
        return copy


def _head(
    directory: Path,
    config: K3DSparkConfig,
    stored: StoredTensor | None,
    files: _Files,
    embed: Tensor,
    target_lm_head: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    if stored is not None:
        _require_match({LM_HEAD: stored}, {LM_HEAD: lm_head_tensor(config.mapping())})
        return files.read({LM_HEAD: stored}, dtype)[LM_HEAD]
    if config.tie_word_embeddings:
        return embed
    if target_lm_head is not None:
        return _from_target(target_lm_head, config, dtype, "lm_head")
    size = 8 + len(header_json([lm_head_tensor(config.mapping())])) + lm_head_tensor(config.mapping()).bytes
    raise BadInput(
        f"{LM_HEAD_FILE} is missing in {directory}",
        "tie_word_embeddings is false, so the output layer is a tensor of its own, and neither the directory nor a "
        "target supplies it",
        f"run `k3dspark fetch --repull --to {directory}` to get {LM_HEAD_FILE} ({size:,} bytes, beside {MODEL_FILE}), "
        "or load the draft together with its target, whose lm_head serves",
    )


def _from_target(tensor: Tensor | None, config: K3DSparkConfig, dtype: torch.dtype, name: str) -> Tensor:
    expected = (config.vocab_size, config.hidden_size)
    if tensor is None:
        raise BadInput(
            f"this draft uses the target's {name}, and none was given",
            "config.json says share_target_embeddings",
            "load the draft together with its target",
        )
    if tuple(tensor.shape) != expected:
        raise BadInput(
            f"the target's {name} has shape {list(tensor.shape)}",
            f"this draft needs {list(expected)} (vocab_size, hidden_size)",
            "the draft was made for another target; use the one it was trained with",
        )
    return tensor.detach().to(dtype)


def _require_token_ids(d2t: Tensor, config: K3DSparkConfig) -> None:
    if d2t.numel() and (int(d2t.min()) < 0 or int(d2t.max()) >= config.vocab_size):
        raise BadInput("d2t holds ids outside the vocabulary", f"vocab_size is {config.vocab_size}", _MISFIT)
    if d2t.unique().numel() != d2t.numel():
        raise BadInput("d2t names a token twice", "the draft vocabulary must be a set of target tokens", _MISFIT)


def save_draft(
    model: K3DSparkModel,
    directory: str | Path,
    *,
    include_lm_head: bool = False,
    share_target_embeddings: bool | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write config.json and model.safetensors, each at once or not at all, in the published layout.

    `share_target_embeddings` leaves out embed_tokens, to be taken from the target on loading (None: as the model's
    config says). `dtype` None keeps the projections'; every float tensor is written in it, and config.json says so.
    Files of an earlier draft in the directory that this one does not have are removed.
    """
    directory = Path(directory)
    dtype = dtype or model.dtype
    mapping = model.config.mapping()
    shared = model.config.share_target_embeddings if share_target_embeddings is None else share_target_embeddings
    if shared != bool(mapping.get("share_target_embeddings", False)):
        mapping["share_target_embeddings"] = shared
    mapping["dtype" if "dtype" in mapping else "torch_dtype"] = str(dtype).removeprefix("torch.")
    require(mapping)
    if include_lm_head and (model.lm_head is None or model.d2t is not None):
        raise BadInput(
            "this draft has no whole lm_head to write",
            "it was loaded without one, or with the rows of a draft vocabulary only",
            "load it together with its target, or leave the lm_head out",
        )

    directory.mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    _write(directory / MODEL_FILE, [(spec, state[spec.name]) for spec in expected_tensors(mapping).values()], dtype)
    if include_lm_head and model.lm_head is not None:
        _write(directory / LM_HEAD_FILE, [(lm_head_tensor(mapping), model.lm_head)], dtype)
    else:
        (directory / LM_HEAD_FILE).unlink(missing_ok=True)
    (directory / INDEX_FILE).unlink(missing_ok=True)
    write_json(directory / "config.json", mapping)


def _write(path: Path, tensors: list[tuple[TensorSpec, Tensor]], dtype: torch.dtype) -> None:
    """Tensors in file order, one at a time, so that saving needs no second copy of the model."""
    for spec, tensor in tensors:
        if tuple(tensor.shape) != spec.shape:
            raise BadInput(
                f"the model's {spec.name} has shape {list(tensor.shape)}",
                f"its config asks for {list(spec.shape)}",
                "the config was changed after the model was built",
            )
    header = header_json(spec for spec, _ in tensors)
    with replacing(path) as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for _, tensor in tensors:
            stored = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
            file.write(stored.reshape(-1).view(torch.uint8).numpy().data)
