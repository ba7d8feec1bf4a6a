"""Each engine's families, read into one vocabulary."""

from __future__ import annotations

import pytest

from k3dspark.errors import BadInput
from k3dspark.monitoring.devices import MIB, read_devices
from k3dspark.monitoring.dialects import version_note
from k3dspark.monitoring.exposition import parse
from k3dspark.monitoring.ranks import missing_families, read_ranks
from scrapes import recorded, sample


def test_vllm_ranks_are_told_apart_by_their_engine_label() -> None:
    ranks = read_ranks(recorded("vllm-dp2-end"), "a", 0.0)
    assert [(rank.rank, rank.counters["rounds"], rank.counters["accepted"]) for rank in ranks] == [
        ("0", 4000.0, 8400.0),
        ("1", 2600.0, 5400.0),
    ]
    assert ranks[0].accepted_per_slot == (3080.0, 2040.0, 1320.0, 850.0, 550.0, 350.0, 210.0)
    assert ranks[1].gauges == {"running": 2.0, "waiting": 2.0, "cache_usage": 0.41}
    assert ranks[1].created == 1.7964e9


def test_a_counter_is_read_with_and_without_total() -> None:
    plain = parse('vllm:spec_decode_num_drafts{engine="0",model_name="m"} 7\n')
    assert read_ranks(plain, "a", 0.0)[0].counters == {"rounds": 7.0}


def test_vllm_s_older_names_mean_the_same() -> None:
    text = sample("vllm-dp2-end").replace("kv_cache_usage_perc", "gpu_cache_usage_perc")
    text = text.replace("inter_token_latency_seconds", "time_per_output_token_seconds")
    assert read_ranks(parse(text), "a", 0.0) == read_ranks(recorded("vllm-dp2-end"), "a", 0.0)


def test_tensor_ranks_of_sglang_repeat_each_other_and_count_once() -> None:
    by_rank = {rank.rank: rank for rank in read_ranks(recorded("sglang"), "a", 0.0)}
    assert by_rank.keys() == {"", "0", "1"}
    assert by_rank["0"].gauges["running"] == 8.0
    assert by_rank["1"].gauges["length"] == 3.0
    assert by_rank[""].counters == {"prompt": 91000.0, "generated": 20400.0}


def test_tokenspeed_counts_as_vllm_does() -> None:
    (rank,) = read_ranks(recorded("tokenspeed"), "a", 0.0)
    assert (rank.dialect.name, rank.counters["rounds"], rank.counters["accepted"]) == ("TokenSpeed", 3500.0, 5600.0)


def test_minus_one_means_unsupported_and_is_no_value() -> None:
    first, idle, dead = read_devices(recorded("npu-exporter"), "a")
    assert (first.utilisation, first.memory_used_bytes, first.power_watts) == (0.87, 57344 * MIB, 298.5)
    assert idle.utilisation == 0.0
    assert (dead.utilisation, dead.memory_used_bytes, dead.temperature_celsius) == (None, None, None)
    assert (idle.healthy, dead.healthy) == (True, False)


def test_dcgm_s_blanks_are_no_values_and_an_xid_is_a_fault() -> None:
    first, second = read_devices(recorded("dcgm"), "a")
    assert (first.utilisation, first.temperature_celsius, first.healthy) == (0.93, 61.0, True)
    assert (second.utilisation, second.temperature_celsius, second.healthy) == (0.41, None, False)
    assert first.memory_total_bytes == 143000 * MIB


def test_missing_families_are_named_as_the_engine_spells_them() -> None:
    plain = parse('vllm:num_requests_running{engine="0",model_name="m"} 1\n')
    missing = missing_families(plain, read_ranks(plain, "a", 0.0))
    assert "vllm:spec_decode_num_drafts" in missing
    assert "vllm:num_requests_running" not in missing


@pytest.mark.parametrize("name", ["vllm-dp2-end", "sglang", "tokenspeed"])
def test_a_whole_scrape_misses_nothing(name: str) -> None:
    exposition = recorded(name)
    assert missing_families(exposition, read_ranks(exposition, "a", 0.0)) == ()


@pytest.mark.parametrize("text", ["<!doctype html><p>log in", '{"error": "no"}', 'vllm:x{a="1} 2'])
def test_what_is_no_exposition_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="no Prometheus exposition"):
        parse(text)


def test_not_a_number_is_no_value() -> None:
    assert parse("a NaN\nb 1\n").by_name.keys() == {"b"}


def test_a_version_whose_counts_run_past_the_end_is_told() -> None:
    assert "past the end" in version_note("vLLM", "0.29.1")
    assert version_note("vLLM", "0.32.0") == version_note("vLLM", "dev") == version_note("SGLang", "0.29.1") == ""
