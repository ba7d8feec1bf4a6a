"""Output of `npu-smi`, of every product and in every state, becomes one structure; garbage never raises."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3dspark.deploy.npu_smi import (
    HccsBandwidth,
    HccsLinks,
    Mapped,
    Process,
    family,
    parse_fields,
    parse_hccs,
    parse_hccs_bandwidth,
    parse_info,
    parse_mapping,
)

SAMPLES = Path(__file__).parent / "samples" / "npu-smi"
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in sorted(SAMPLES.glob("*.txt"))}
TABLES = [name for name in TEXTS if not name.startswith("info-")]

# version, family, chips as (npu, chip, phy id, healthy, free MB), bfloat16
EXPECTED = {
    "a2-910b3-23.0.3.txt": ("23.0.3", "A2", [(0, 0, None, True, 62377), (1, 0, None, True, 32410)], True),
    "a2-910b4-32g-25.5.2.txt": ("25.5.2", "A2", [(5, 0, None, True, 29846)], True),
    "a3-ascend910-24.1.rc3.7.txt": (
        "24.1.rc3.7",
        "A3",
        [(0, 0, 0, True, 62139), (0, 1, 1, True, 62350), (1, 0, 2, True, 7843), (1, 1, 3, True, 7705)],
        True,
    ),
    "a3-ascend910-wide-26.0.rc2.txt": ("26.0.rc2", "A3", [(0, 0, 0, True, 62117), (0, 1, 1, True, 62662)], True),
    "950-25.7.txt": ("25.7.rc1", "950", [(0, 0, 0, True, 121856), (1, 0, 1, True, 126976)], True),
    "310p3-24.1.txt": ("24.1.0", "310P", [(2, 0, None, True, 42679), (2, 1, None, True, 42188)], False),
    "910a-first-generation.txt": ("22.0.4", "910", [(0, 0, None, True, 32768)], False),
    "unhealthy-910b2.txt": ("24.1.rc2", "A2", [(0, 0, None, True, 62196), (1, 0, None, False, None)], True),
    "localised-zh.txt": ("25.2.0", "A3", [(0, 0, 0, True, 62134), (0, 1, 1, False, 62346)], True),
    "containers-910b1.txt": ("26.0.0", "A2", [(3, 0, None, True, 4535)], True),
    "no-driver.txt": ("", "", [], None),
    "no-chip.txt": ("25.5.2", "", [], None),
}


def test_there_is_an_expectation_for_every_table() -> None:
    assert sorted(EXPECTED) == TABLES
    assert len(TABLES) >= 12


@pytest.mark.parametrize("name", TABLES)
def test_a_table_becomes_the_one_structure(name: str) -> None:
    info = parse_info(TEXTS[name])
    chips = [(chip.npu, chip.chip, chip.phy_id, chip.healthy, chip.free_mb) for chip in info.chips]
    version, product, expected, bf16 = EXPECTED[name]
    assert (info.version, chips, info.cut) == (version, expected, False)
    assert {chip.family for chip in info.chips} == ({product} if expected else set())
    assert {chip.bf16 for chip in info.chips} == ({bf16} if expected else set())


def test_processes_are_read_with_and_without_chip_and_container_columns() -> None:
    assert parse_info(TEXTS["a2-910b3-23.0.3.txt"]).processes == (Process(1, 0, 4242, "python3", 30012),)
    assert parse_info(TEXTS["950-25.7.txt"]).processes == (Process(0, None, 771, "VLLM::Worker_TP0", 5120),)
    assert parse_info(TEXTS["containers-910b1.txt"]).processes == (Process(3, 0, 31337, "VLLM::EngineCor", 57610),)


def test_power_temperature_and_load_are_numbers_or_unknown() -> None:
    first, second = parse_info(TEXTS["a3-ascend910-wide-26.0.rc2.txt"]).chips
    assert (first.power_watts, first.temperature_celsius, first.aicore_percent) == (162.6, 34.0, 0.0)
    assert second.power_watts is None
    sick = parse_info(TEXTS["unhealthy-910b2.txt"]).chips[1]
    assert (sick.health, sick.power_watts, sick.memory_total_mb) == ("Alarm", None, None)


def test_without_a_table_the_tools_own_words_are_kept() -> None:
    assert parse_info(TEXTS["no-driver.txt"]).complaint == "DrvMngGetConsoleLogLevel failed. (ret=4)"


@pytest.mark.parametrize("name", ["a2-910b3-23.0.3.txt", "a3-ascend910-24.1.rc3.7.txt", "950-25.7.txt"])
@pytest.mark.parametrize("change", ["crlf", "indented", "coloured", "squeezed", "full-width"])
def test_widths_colours_and_line_ends_do_not_matter(name: str, change: str) -> None:
    text = TEXTS[name]
    changed = {
        "crlf": text.replace("\n", "\r\n"),
        "indented": "\n".join("    " + line for line in text.splitlines()),
        "coloured": text.replace("OK", "\x1b[32mOK\x1b[0m"),
        "squeezed": "\n".join(" ".join(line.split()) for line in text.splitlines()),
        "full-width": text.replace("|", "｜"),
    }[change]
    assert parse_info(changed) == parse_info(text)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_cut_off_anywhere_gives_a_prefix_of_its_chips(name: str) -> None:
    text, whole = TEXTS[name], parse_info(TEXTS[name]).chips
    for end in range(0, len(text), 7):
        info = parse_info(text[:end])
        ids = [(chip.npu, chip.name) for chip in info.chips]
        assert ids == [(chip.npu, chip.name) for chip in whole][: len(ids)]
        assert all(got == full for got, full in zip(info.chips[:-1], whole, strict=False) if got.family == full.family)
        if info.chips and info.chips[-1].bus_id == "":
            assert info.cut


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("910B3", "A2"),
        ("Ascend910B4-1", "A2"),
        ("910B", "910"),
        ("910ProB", "910"),
        ("910PremiumA", "910"),
        ("Ascend910_9382", "A3"),
        ("910C", "A3"),
        ("Ascend910", ""),
        ("Ascend 950DT", "950"),
        ("310P3", "310P"),
        ("310B4", "310B"),
        ("310", "310"),
        ("Mcu", ""),
        ("", ""),
    ],
)
def test_a_chips_name_tells_its_family_only_where_it_does(name: str, expected: str) -> None:
    assert family(name) == expected


def test_fields_of_board_and_memory_queries() -> None:
    assert parse_fields(TEXTS["info-t-board.txt"])["firmware version"] == "7.8.0.2.212"
    assert parse_fields(TEXTS["info-t-memory.txt"])["hbm capacity(mb)"] == "65536"
    assert parse_fields(TEXTS["info-l.txt"])["total count"] == "16"


def test_the_mapping_of_both_shapes_leaves_out_management_chips() -> None:
    assert parse_mapping(TEXTS["info-m-a2.txt"]) == (Mapped(0, 0, 0, "Ascend 910B3"), Mapped(1, 0, 1, "Ascend 910B3"))
    assert parse_mapping(TEXTS["info-m-950.txt"]) == (Mapped(0, 0, 0, "Ascend950PR"), Mapped(1, 0, 1, "Ascend950PR"))


def test_hccs_bandwidth_is_the_total_row_or_the_sum_of_links() -> None:
    text = TEXTS["info-t-hccs-bw.txt"]
    assert parse_hccs_bandwidth(text) == HccsBandwidth(3.081, 3.140)
    without = "\n".join(line for line in text.splitlines() if "total" not in line)
    assert parse_hccs_bandwidth(without) == HccsBandwidth(pytest.approx(0.99), pytest.approx(0.99))
    assert parse_hccs_bandwidth("not supported") is None


def test_hccs_counters_are_summed_over_links() -> None:
    assert parse_hccs(TEXTS["info-t-hccs.txt"]) == HccsLinks(True, 6000, 7500, 1, 2)
    assert parse_hccs("This device does not support querying hccs.") is None


LINES = st.sampled_from([line for text in TEXTS.values() for line in text.splitlines()])
NOISE = st.text(st.characters(codec="utf-8"), max_size=60) | st.sampled_from(
    [
        "|",
        "| |",
        "|||||",
        "| 0 x | OK | 1 |",
        "| 0 | NA | 0 1/2 |",
        "｜0｜1｜2｜3｜",
        "\x1b[31m",
        "9" * 400,
        "| 1 2 | 3 | 4 | 5",
    ]
)


@given(st.lists(LINES | NOISE, max_size=30))
def test_any_text_gives_a_structure(lines: list[str]) -> None:
    text = "\n".join(lines)
    info = parse_info(text)
    assert all(chip.free_mb is None or chip.memory_total_mb is not None for chip in info.chips)
    parse_fields(text)
    parse_mapping(text)
    parse_hccs_bandwidth(text)
    parse_hccs(text)


@given(st.binary(max_size=400))
def test_bytes_that_are_no_text_give_a_structure(data: bytes) -> None:
    assert parse_info(data.decode("utf-8", "replace")).chips == ()
