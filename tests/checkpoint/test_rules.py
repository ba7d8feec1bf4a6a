"""The table of config rules: one fault gives one verdict, and nothing makes it raise."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3dspark.checkpoint.fields import BY_NAME, FIELDS, rope_multiplier, softmax_scale
from k3dspark.checkpoint.published import published_config, tiny_config
from k3dspark.checkpoint.rules import RULES, evaluate, require
from k3dspark.errors import BadInput

DELETE = object()
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**4000, -1, 0, 2**63]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


def changed(path: str, value: Any, base: dict[str, Any] | None = None) -> dict[str, Any]:
    config = copy.deepcopy(base or published_config())
    *outer, last = path.split(".")
    place = config
    for key in outer:
        place = place[key]
    if value is DELETE:
        del place[last]
    else:
        place[last] = value
    return config


def failures(config: dict[str, Any]) -> list[tuple[str, str]]:
    return [(verdict.rule.id, verdict.field) for verdict in evaluate(config) if verdict.status == "fail"]


@pytest.mark.parametrize("config", [published_config(), tiny_config()], ids=["published", "tiny"])
def test_the_published_config_and_its_miniature_satisfy_every_rule(config: dict[str, Any]) -> None:
    assert {verdict.status for verdict in evaluate(config)} <= {"pass", "skip"}


@pytest.mark.parametrize(
    ("path", "value", "rule", "field"),
    [
        ("rope_parameters.factor", 16.0, "rope.product", "rope_parameters.factor"),
        (
            "rope_parameters.original_max_position_embeddings",
            16384,
            "rope.product",
            "rope_parameters.original_max_position_embeddings",
        ),
        ("max_position_embeddings", 131072, "rope.product", "max_position_embeddings"),
        ("target_layer_ids", [23, 2, 47, 71, 89], "taps.sorted", "target_layer_ids"),
        ("target_layer_ids", [2, 23, 23, 71, 89], "taps.distinct", "target_layer_ids"),
        ("target_layer_ids", [2, 23, 47, 71, 93], "taps.in_range", "target_layer_ids"),
        ("target_layer_ids", [-1, 23, 47, 71, 89], "kind.target_layer_ids", "target_layer_ids"),
        ("target_layer_ids", [2, 23, 47, 71], "taps.count", "target_layer_ids"),
        ("target_layer_ids", [], "kind.target_layer_ids", "target_layer_ids"),
        ("target_layer_ids", "2,23", "kind.target_layer_ids", "target_layer_ids"),
        ("target_layer_ids", [2, 23, 47, 71, 89.0], "kind.target_layer_ids", "target_layer_ids"),
        ("num_target_layers", 4, "taps.count", "target_layer_ids"),
        ("mask_token_id", 163840, "ids.mask", "mask_token_id"),
        ("eos_token_id", [163586, 163840], "ids.eos", "eos_token_id"),
        ("mla_use_nope", True, "mla.nope", "mla_use_nope"),
        ("mla_use_output_gate", True, "mla.output_gate", "mla_use_output_gate"),
        ("draft_vocab_size", 163841, "vocabulary.draft", "draft_vocab_size"),
        ("hidden_size", DELETE, "kind.hidden_size", "hidden_size"),
        ("hidden_size", None, "kind.hidden_size", "hidden_size"),
        ("hidden_size", True, "kind.hidden_size", "hidden_size"),
        ("hidden_size", "7168", "kind.hidden_size", "hidden_size"),
        ("hidden_size", 7168.0, "kind.hidden_size", "hidden_size"),
        ("hidden_size", -7168, "kind.hidden_size", "hidden_size"),
        ("hidden_size", 10**300, "kind.hidden_size", "hidden_size"),
        ("rms_norm_eps", float("nan"), "kind.rms_norm_eps", "rms_norm_eps"),
        ("rms_norm_eps", "1e-5", "kind.rms_norm_eps", "rms_norm_eps"),
        ("rms_norm_eps", 0, "kind.rms_norm_eps", "rms_norm_eps"),
        ("rope_theta", float("inf"), "kind.rope_theta", "rope_theta"),
        ("rope_theta", 10000.0, "rope.theta_agrees", "rope_theta"),
        ("rope_parameters", "yarn", "kind.rope_parameters", "rope_parameters"),
        ("rope_parameters.rope_type", "llama3", "kind.rope_parameters.rope_type", "rope_parameters.rope_type"),
        ("rope_parameters.mscale_all_dim", DELETE, "rope.yarn_mscale_all_dim", "rope_parameters.mscale_all_dim"),
        ("rope_parameters.factor", DELETE, "rope.yarn_factor", "rope_parameters.factor"),
        ("rope_parameters.factor", float("nan"), "kind.rope_parameters.factor", "rope_parameters.factor"),
        ("rope_parameters.beta_fast", 0.5, "rope.betas", "rope_parameters.beta_fast"),
        ("num_key_value_heads", 8, "heads.kv", "num_key_value_heads"),
        ("qk_rope_head_dim", 63, "heads.rope_even", "qk_rope_head_dim"),
        ("markov_head_type", "Vanilla", "kind.markov_head_type", "markov_head_type"),
        ("torch_dtype", "int8", "kind.torch_dtype", "torch_dtype"),
        ("dtype", "float16", "dtype.agrees", "torch_dtype"),
        ("hidden_act", "situ", "kind.hidden_act", "hidden_act"),
        ("model_type", "qwen3", "kind.model_type", "model_type"),
        ("tie_word_embeddings", "false", "kind.tie_word_embeddings", "tie_word_embeddings"),
        ("dflash_config", {"mask_token_id": 5}, "ids.mask_agrees", "mask_token_id"),
    ],
)
def test_one_wrong_value_fails_exactly_one_rule(path: str, value: Any, rule: str, field: str) -> None:
    assert failures(changed(path, value)) == [(rule, field)]


@pytest.mark.parametrize("name", [field.name for field in FIELDS])
def test_every_required_field_is_named_when_it_is_missing(name: str) -> None:
    config = published_config()
    config.pop(name, None)
    expected = [(f"kind.{name}", name)] if BY_NAME[name].required else []
    if name == "rope_parameters":  # without the block positions are plain RoPE, which is another valid model
        expected = []
    assert failures(config) == expected


def test_a_theta_that_is_stated_nowhere_is_an_error() -> None:
    config = changed("rope_parameters.rope_theta", DELETE)
    del config["rope_theta"]
    assert failures(config) == [("rope.theta_stated", "rope_theta")]


def test_an_older_rope_scaling_block_is_read_like_rope_parameters() -> None:
    config = published_config()
    block = config.pop("rope_parameters")
    block["type"] = block.pop("rope_type")
    del block["rope_theta"]
    config["rope_scaling"] = block
    assert failures(config) == []
    assert softmax_scale(config) == pytest.approx(0.1308608, abs=1e-7)


def test_published_figures_of_attention() -> None:
    assert softmax_scale(published_config()) == pytest.approx(0.13086080, abs=1e-8)
    assert rope_multiplier(published_config()) == 1.0
    lost = changed("rope_parameters.mscale_all_dim", 0.0)
    assert softmax_scale(lost) == pytest.approx(0.07216878, abs=1e-8)
    assert rope_multiplier(lost) == pytest.approx(1.34657, abs=1e-5)


def test_a_suspicious_but_usable_config_warns_and_does_not_fail() -> None:
    shared_mask = changed("mask_token_id", 163839)
    assert [v.rule.id for v in evaluate(shared_mask) if v.status == "warn"] == ["ids.mask_own"]
    three_layers = changed("num_hidden_layers", 3)
    assert [v.rule.id for v in evaluate(three_layers) if v.status == "warn"] == ["block.causality_stated"]
    nameless = {name: value for name, value in published_config().items() if name != "architectures"}
    for without in (nameless, changed("architectures", [])):
        assert [v.rule.id for v in evaluate(without) if v.status == "warn"] == ["architectures.stated"]
        require(without)
    require(shared_mask)


def test_an_error_says_field_value_reason_and_remedy() -> None:
    with pytest.raises(BadInput) as caught:
        require(changed("rope_parameters.factor", 16.0), "config.json")
    error = caught.value
    assert error.what == (
        "config.json: rope_parameters.factor: 16 × 32768 = 524288, but max_position_embeddings is 1048576"
    )
    assert "acceptance" in error.why
    assert "32.0 × 32768 = 1048576" in error.remedy


def test_rule_ids_are_unique_and_every_rule_speaks() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)
    assert all(rule.must and rule.consequence and rule.remedy for rule in RULES)


@given(st.dictionaries(st.sampled_from([field.name for field in FIELDS]), JSON, max_size=6))
def test_no_values_make_the_rules_raise(values: dict[str, Any]) -> None:
    verdicts = evaluate({**published_config(), **values})
    assert len(verdicts) == len(RULES)
    assert all(len(verdict.found) < 2000 for verdict in verdicts)


@given(
    st.dictionaries(
        st.sampled_from([*published_config()["rope_parameters"], "type"]),
        JSON | st.floats(1e-3, 1e3) | st.sampled_from(["yarn", "default"]),
    )
)
def test_no_rope_block_makes_the_rules_raise(block: dict[str, Any]) -> None:
    evaluate({**published_config(), "rope_parameters": block})


@given(st.lists(st.integers(-3, 12), max_size=7))
def test_taps_pass_exactly_when_ascending_distinct_in_range_and_counted(taps: list[int]) -> None:
    config = {**tiny_config(), "target_layer_ids": taps}
    sound = taps == sorted(set(taps)) and len(taps) == 5 and all(0 <= tap < 8 for tap in taps)
    assert (failures(config) == []) == sound


def test_verdicts_are_plain_enough_for_json() -> None:
    json.dumps([(v.rule.id, v.status, v.field, v.found) for v in evaluate(published_config())])
