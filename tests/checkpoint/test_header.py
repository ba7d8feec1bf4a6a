"""Reading safetensors headers: what the library accepts is read, everything else is a named error."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from k3dspark.checkpoint.header import HEADER_BYTES, MalformedFile, read_header
from k3dspark.checkpoint.pointer import Pointer, parse_pointer, pointer_text
from k3dspark.errors import BadInput, K3DSparkError

np = pytest.importorskip("numpy")


def sample() -> bytes:
    return save({"a": np.zeros((2, 3), np.float32), "b": np.ones(4, np.float16)}, {"format": "pt"})


def framed(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def kind_of(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(MalformedFile) as caught:
        read_header(path).require_whole()
    assert caught.value.what
    assert caught.value.remedy
    return caught.value.kind


def test_a_file_of_the_library_is_read_to_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(sample())
    header = read_header(path).require_whole()
    assert {name: (t.dtype, t.shape) for name, t in header.tensors.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("F16", (4,)),
    }
    assert header.metadata == {"format": "pt"}
    assert header.expected_bytes == header.file_bytes == len(sample())
    assert header.parameters == 10


def test_a_file_cut_by_one_byte_is_still_described(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(sample()[:-1])
    header = read_header(path)
    assert header.missing_bytes == 1
    with pytest.raises(MalformedFile, match="cut short by 1 bytes"):
        header.require_whole()


def test_a_header_length_that_looks_like_a_pickle_is_a_header(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(framed(json.dumps({"a": entry()}).encode().ljust(0x280), bytes(8)))
    assert path.read_bytes()[:2] == b"\x80\x02"
    assert set(read_header(path).tensors) == {"a"}


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "not_safetensors"),
        (b"1234567", "not_safetensors"),
        (struct.pack("<Q", 1 << 30) + b"{}", "header_length"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "header_length"),
        (framed(b"{}" + b" " * HEADER_BYTES), "header_length"),
        (framed(b"[1]     "), "not_safetensors"),
        (framed(b"{"), "header_json"),
        (framed(b'{"a":1}'), "header_entry"),
        (framed(b'{"a\xff":1}'), "header_json"),
        (framed(b'{"a":' * 90_000), "header_json"),
        (framed(b'{"a":' + b"[" * 100_000), "header_json"),
        (framed(b"{" + b'"a":[],' * 200_000 + b'"b":1}'), "header_json"),
        (framed(b'{"a":' + b"9" * 5000 + b"}"), "header_json"),
        (framed(b'{"__metadata__":{"a":1}}'), "header_json"),
        (b"PK\x03\x04" + bytes(100), "pickle"),
        (b"\x80\x02}q" + bytes(100), "pickle"),
        (sample()[:-1], "truncated"),
        (sample() + b"\0", "overlong"),
        (pointer_text(Pointer("ab" * 32, 7_124_633_402)), "lfs_pointer"),
        (b"version https://git-lfs.github.com/spec/v1\nnothing else\n", "header_length"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_kind_of_damage_has_its_own_name(tmp_path: Path, data: bytes, kind: str) -> None:
    assert kind_of(tmp_path / "model.safetensors", data) == kind


@pytest.mark.parametrize(
    ("tensors", "kind"),
    [
        ({"a": entry("F31")}, "header_entry"),
        ({"a": entry(shape=[3])}, "header_entry"),
        ({"a": entry(shape=[-2])}, "header_entry"),
        ({"a": entry(shape=[True, 2])}, "header_entry"),
        ({"a": entry(shape=[2.0])}, "header_entry"),
        ({"a": entry(shape=[1] * 17 + [2])}, "header_entry"),
        ({"a": entry(shape=[2**62] * 16)}, "header_entry"),
        ({"a": entry(offsets=[8, 0])}, "header_entry"),
        ({"a": entry(offsets=[0, 8, 16])}, "header_entry"),
        ({"a": {**entry(), "more": 1}}, "header_entry"),
        ({"a": entry("F4", [3], [0, 1])}, "header_entry"),
        ({"a": entry(), "b": entry(offsets=[4, 12])}, "header_offsets"),
        ({"a": entry(), "b": entry(offsets=[12, 20])}, "header_offsets"),
        ({"a": entry(offsets=[8, 16])}, "header_offsets"),
    ],
)
def test_entries_that_contradict_themselves_are_refused(tmp_path: Path, tensors: dict[str, Any], kind: str) -> None:
    assert kind_of(tmp_path / "model.safetensors", framed(json.dumps(tensors).encode(), bytes(64))) == kind


def test_a_doubled_tensor_name_is_named(tmp_path: Path) -> None:
    text = json.dumps({"a": entry()})[1:-1]
    path = tmp_path / "model.safetensors"
    path.write_bytes(framed(f"{{{text},{text}}}".encode(), bytes(8)))
    with pytest.raises(MalformedFile, match='the key "a" stands there twice'):
        read_header(path)


def test_the_pointer_message_names_the_real_size_and_the_cure(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(pointer_text(Pointer("ab" * 32, 7_124_633_402)))
    assert path.stat().st_size == 135
    with pytest.raises(MalformedFile) as caught:
        read_header(path)
    assert "7,124,633,402" in caught.value.why
    assert "git lfs pull" in caught.value.remedy


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: None], ids=["directory", "nothing"])
def test_what_is_not_a_file_is_refused(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "model.safetensors")
    with pytest.raises(BadInput, match="cannot be read"):
        read_header(tmp_path / "model.safetensors")


def test_a_named_pipe_does_not_hang_the_reader(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(BadInput, match="not a regular file"):
        read_header(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "header",
    [
        b"{" + b",".join(b'"%d":{}' % i for i in range(110_000)) + b"}",
        b'{"a":[' + b",".join([b"[]"] * 79_000) + b"]}",
        b'{"\xf0\x9f\x98\x80' + b"a" * (HEADER_BYTES - 20) + b'":1}',
        b'{"a":[' + b"1.5," * 150_000 + b"1]}",
        b'{"a":"' + b"\\u1234" * 340_000 + b'"}',
    ],
    ids=["tensors", "lists", "wide text", "numbers", "escapes"],
)
def test_no_header_makes_the_reader_take_more_than_64_mib(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(framed(header))
    del header
    tracemalloc.start()
    try:
        with pytest.raises(MalformedFile):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@settings(max_examples=300)
@given(
    st.binary(max_size=200)
    | st.binary(max_size=120).map(framed)
    | st.text(max_size=60).map(lambda t: framed(t.encode()))
)
@example(b"version ")
def test_any_bytes_give_a_header_or_an_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(data)
    try:
        read_header(path).require_whole()
    except K3DSparkError as error:
        complete = bool(error.what and error.why and error.remedy)
        assert complete


@settings(max_examples=300)
@given(st.data())
def test_one_changed_byte_is_never_misread_silently(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Either an error, or what the safetensors library itself reads."""
    from safetensors import safe_open

    content = bytearray(sample())
    length = 8 + int.from_bytes(content[:8], "little")
    content[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.write_bytes(bytes(content))
    try:
        header = read_header(path).require_whole()
    except K3DSparkError:
        return
    with safe_open(path, framework="np") as file:
        assert set(file.keys()) == set(header.tensors)
        for name, tensor in header.tensors.items():
            assert tuple(file.get_slice(name).get_shape()) == tensor.shape


@given(st.binary(max_size=300))
def test_any_bytes_are_a_pointer_or_not(data: bytes) -> None:
    parse_pointer(data)
    parse_pointer(b"version https://git-lfs.github.com/spec/v1\n" + data)


@given(st.integers(0, 10**18), st.binary(min_size=32, max_size=32))
def test_a_pointer_survives_writing_and_reading(size: int, digest: bytes) -> None:
    pointer = Pointer(digest.hex(), size)
    assert parse_pointer(pointer_text(pointer)) == pointer
