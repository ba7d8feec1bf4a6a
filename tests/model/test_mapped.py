"""Drafts whose weights stay in the mapped file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from k3dspark.checkpoint.header import read_header
from k3dspark.checkpoint.synth import synthesise
from k3dspark.model.loading import load_draft
from k3dspark.model.mapped import MappedFile

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    synthesise(tmp_path / "pair", tiny=True, seed=3)
    return tmp_path / "pair" / "draft"


def resident_file_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile:"))


def test_a_mapped_draft_is_the_draft_that_was_read(checkpoint: Path) -> None:
    read, mapped = load_draft(checkpoint), load_draft(checkpoint, mapped=True)
    assert all(torch.equal(tensor, mapped.state_dict()[name]) for name, tensor in read.state_dict().items())
    assert read.files == ()
    assert len(mapped.files) == 2


def test_a_mapped_draft_proposes_what_the_other_does_after_its_pages_were_given_back(checkpoint: Path) -> None:
    proposals = []
    for mapped in (False, True):
        draft = load_draft(checkpoint, mapped=mapped).pack()
        cache = draft.new_cache()
        taps = torch.randn(5, draft.config.context_width, generator=torch.Generator().manual_seed(0))
        cache.append(draft.context_rows(taps, torch.arange(5)))
        proposals.append(draft.propose([cache], torch.tensor([7]), torch.tensor([5])))
    assert torch.equal(proposals[0].tokens, proposals[1].tokens)
    torch.testing.assert_close(proposals[0].confidence, proposals[1].confidence)  # kernels differ by alignment


def test_another_dtype_is_a_copy(checkpoint: Path) -> None:
    draft = load_draft(checkpoint, dtype=torch.float64, mapped=True)
    assert draft.dtype == torch.float64


def test_writing_to_a_mapped_tensor_leaves_the_file_as_it_was(checkpoint: Path) -> None:
    before = (checkpoint / "model.safetensors").read_bytes()
    draft = load_draft(checkpoint, mapped=True)
    with torch.no_grad():
        draft.context_proj.weight.fill_(1.0)
    assert (checkpoint / "model.safetensors").read_bytes() == before


@linux
def test_pages_that_were_given_back_are_not_resident_and_read_the_same_again(tmp_path: Path) -> None:
    size = 8 << 20
    save_file({"odd": torch.ones(1).bfloat16(), "large": torch.arange(size)}, tmp_path / "model.safetensors")
    header = read_header(tmp_path / "model.safetensors")
    file = MappedFile(header.path)
    tensor = file.tensor(header.tensors["large"])
    before = resident_file_bytes()
    total = int(tensor.sum())
    assert resident_file_bytes() - before > size * 7
    file.give_back(tensor)
    assert resident_file_bytes() - before < size
    assert int(tensor.sum()) == total


@linux
def test_reading_a_draft_keeps_no_second_copy_resident(tmp_path: Path, checkpoint: Path) -> None:
    before = resident_file_bytes()
    load_draft(checkpoint)
    assert resident_file_bytes() - before < 4 << 20
