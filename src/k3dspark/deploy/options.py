"""What is to be launched, and whether the engine of that version can do it. Refusals happen here, before any file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from k3dspark.checkpoint.fields import value_of
from k3dspark.deploy.engines import FEATURES, Engine, Hazard, engine_named
from k3dspark.errors import BadInput

DEVICES: Final[Mapping[str, tuple[str, ...]]] = {
    "vllm": ("cuda", "cpu"),
    "vllm-ascend": ("npu-a3", "npu-a2"),
    "sglang": ("npu-a3", "npu-a2", "cuda"),
}
_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.:_-]*[A-Za-z0-9])?")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,99}")


@dataclass(frozen=True)
class DraftFacts:
    """What of the draft's config decides its launch."""

    heads: int
    block_size: int
    context: int
    target_layers: int
    target_hidden: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> DraftFacts:
        return cls(
            heads=int(config["num_attention_heads"]),
            block_size=int(value_of(config, "block_size")),
            context=int(config["max_position_embeddings"]),
            target_layers=int(value_of(config, "target_num_hidden_layers") or 0),
            target_hidden=int(config["target_hidden_size"]),
        )

    @property
    def for_kimi_k3(self) -> bool:
        """Whether the target is Kimi K3, whose parsers, experts and tokenizer need options of their own."""
        return (self.target_layers, self.target_hidden) == (93, 7168)


@dataclass(frozen=True)
class LaunchWish:
    """Everything a launch directory is written from; kept in its plan.json, so that it can be written again."""

    engine: str
    draft: str
    target: str
    version: str = ""
    device: str = ""
    nodes: int = 1
    devices: int = 1
    hosts: tuple[str, ...] = ()
    interface: str = ""
    port: int = 8000
    rpc_port: int = 13389
    tensor_parallel: int = 0
    context: int = 0
    sequences: int = 16
    draft_tokens: int = 0
    lengths: tuple[tuple[int, int, int], ...] = ()
    draft_tensor_parallel: int = 0
    sampling: str = "greedy"
    rejection: str = "standard"
    adaptive: bool = False
    prefix_caching: bool = False
    decode_context_parallel: int = 1
    pipeline_parallel: int = 1
    cache_dtype: str = "auto"
    quantization: str = ""
    utilisation: float = 0.9
    eager: bool = False
    trust_remote_code: bool = False
    build_has: tuple[str, ...] = ()
    served_name: str = ""
    image: str = ""
    user: str = ""
    home: str = ""
    python: str = "python3"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, mapping: Mapping[str, Any]) -> LaunchWish:
        """Raises `BadInput` on a mapping that no `as_json` wrote."""
        known = {field.name: field for field in fields(cls)}
        try:
            values = {name: _frozen(mapping[name]) for name in known if name in mapping}
            return cls(**values)
        except TypeError as error:
            raise BadInput("plan.json has no usable wish", str(error), "write the plan again") from error


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Settled:
    """A wish that its engine can fulfil, with every default filled in, and what to know about it."""

    wish: LaunchWish
    facts: DraftFacts
    engine: Engine
    warnings: tuple[Hazard, ...]

    @property
    def data_parallel(self) -> int:
        """Replicas of the attention layers: one a node for vLLM and for SGLang's data-parallel attention."""
        if self.engine.name == "sglang":
            return self.wish.nodes
        return self.wish.nodes * self.wish.devices // self.wish.tensor_parallel

    @property
    def on_npu(self) -> bool:
        return self.wish.device.startswith("npu")


def settle(facts: DraftFacts, wish: LaunchWish) -> Settled:
    """Fill in defaults and check everything. Raises `BadInput` naming the version that has what is missing."""
    engine = engine_named(wish.engine)
    wish = _with_defaults(facts, wish, engine)
    _check_cluster(wish, engine)
    _check_draft(facts, wish, engine)
    for feature, option in _wanted(wish):
        if feature not in wish.build_has:
            engine.require(feature, wish.version, option)
    _check_adaptive(wish, engine)
    _check_lengths(wish)
    return Settled(wish, facts, engine, tuple(_warnings(wish, engine)))


def _with_defaults(facts: DraftFacts, wish: LaunchWish, engine: Engine) -> LaunchWish:
    whole = wish.nodes * wish.devices
    tensor = wish.tensor_parallel or (whole if engine.name == "sglang" else wish.devices)
    hosts = wish.hosts or (("127.0.0.1",) if wish.nodes == 1 else tuple(f"node-{n}" for n in range(wish.nodes)))
    device = wish.device or DEVICES[engine.name][0]
    return replace(
        wish,
        version=wish.version or engine.advised,
        device=device,
        tensor_parallel=tensor,
        hosts=hosts,
        context=wish.context or min(facts.context, 131072),
        draft_tokens=wish.draft_tokens or facts.block_size,
        draft_tensor_parallel=wish.draft_tensor_parallel or tensor,
        served_name=wish.served_name or ("kimi-k3" if facts.for_kimi_k3 else "target"),
        eager=wish.eager or device == "cpu",
    )


def _wanted(wish: LaunchWish) -> Iterable[tuple[str, str]]:
    """(feature, the option that asks for it) of everything this wish needs from its engine."""
    yield "dspark", "--engine with a DSpark draft"
    yield "k3_mla_draft", "a draft of architecture K3DSparkModel"
    yield f"{wish.sampling}_draft", f"--sampling {wish.sampling}"
    yield f"{wish.rejection}_rejection", f"--rejection {wish.rejection}"
    if wish.adaptive:
        yield "adaptive_verification", "--adaptive"
    if wish.lengths:
        yield "length_by_batch", "a draft length for each batch size"
    if wish.prefix_caching:
        yield "prefix_caching", "--prefix-caching"
    if wish.decode_context_parallel > 1:
        yield "decode_context_parallel", f"--decode-context-parallel {wish.decode_context_parallel}"
    if wish.pipeline_parallel > 1:
        yield "pipeline_parallel", f"--pipeline-parallel {wish.pipeline_parallel}"
    if wish.cache_dtype.startswith("fp8"):
        yield "draft_kv_fp8", f"--cache-dtype {wish.cache_dtype}"
    if wish.engine != "sglang" and wish.draft_tensor_parallel == 1 != wish.tensor_parallel:
        yield "draft_tensor_parallel_own", "--draft-tensor-parallel 1"


def _check_cluster(wish: LaunchWish, engine: Engine) -> None:
    whole = wish.nodes * wish.devices
    faults = [
        (
            wish.device not in DEVICES[engine.name],
            f"--device {wish.device} does not go with {engine.title}",
            f"it runs on {', '.join(DEVICES[engine.name])}",
        ),
        (
            wish.nodes < 1 or wish.devices < 1,
            f"{wish.nodes} nodes of {wish.devices} devices are no cluster",
            "both must be at least 1",
        ),
        (
            wish.nodes > 256 or wish.devices > 64,
            f"{wish.nodes} nodes of {wish.devices} devices are too many",
            "at most 256 nodes of 64 devices are written",
        ),
        (
            len(wish.hosts) != wish.nodes,
            f"--hosts names {len(wish.hosts)} hosts for {wish.nodes} nodes",
            "each node needs one, in order; the first is the head",
        ),
        (len(set(wish.hosts)) != len(wish.hosts), "--hosts names a host twice", "each node starts its own engine"),
        (
            any(not _HOST.fullmatch(host) for host in wish.hosts),
            f"--hosts holds {', '.join(wish.hosts)!r}",
            "hosts are names or addresses",
        ),
        (
            bool(wish.interface) and not re.fullmatch(r"[A-Za-z0-9._:@-]+", wish.interface),
            f"--interface {wish.interface!r} is no interface",
            "names look like eth0 or enp196s0f0",
        ),
        (
            not _NAME.fullmatch(wish.served_name),
            f"--served-name {wish.served_name!r} cannot be used",
            "letters, digits, dot, dash, underscore and slash are allowed",
        ),
        (
            not all(1024 <= port <= 65535 for port in (wish.port, wish.rpc_port)) or wish.port == wish.rpc_port,
            f"ports {wish.port} and {wish.rpc_port} cannot be used",
            "two different ones from 1024 to 65535 are needed",
        ),
        (
            whole % wish.tensor_parallel != 0 or (engine.name != "sglang" and wish.devices % wish.tensor_parallel != 0),
            f"--tensor-parallel {wish.tensor_parallel} does not divide {wish.devices} devices a node",
            "a tensor parallel group stays within a node, where links are fast",
        ),
        (
            any("\n" in text or "\0" in text for text in (wish.draft, wish.target, wish.home, wish.user, wish.image)),
            "a path or name holds a line break",
            "it would become a line of its own in the scripts",
        ),
        (
            not 0.1 <= wish.utilisation <= 0.99,
            f"--utilisation {wish.utilisation} is out of range",
            "it is the share of device memory that the engine takes",
        ),
    ]
    for fault, what, why in faults:
        if fault:
            raise BadInput(what, why, "correct the option and plan again")


def _check_draft(facts: DraftFacts, wish: LaunchWish, engine: Engine) -> None:
    if wish.rejection == "synthetic":
        raise BadInput(
            "--rejection synthetic is refused",
            "it accepts at a given rate whatever the target says: the output is no longer the target's",
            "use standard or block; measure costs with k3dspark bench instead",
        )
    for option, value, known in (
        ("--sampling", wish.sampling, ("greedy", "probabilistic")),
        ("--rejection", wish.rejection, ("standard", "block")),
    ):
        if value not in known:
            raise BadInput(f"{option} {value} is unknown", f"known are {', '.join(known)}", "pass one of them")
    unknown = [name for name in wish.build_has if name not in FEATURES]
    if unknown:
        raise BadInput(f"--build-has {unknown[0]} is unknown", f"known are {', '.join(FEATURES)}", "pass one of these")
    if wish.rejection == "block" and wish.sampling == "greedy":
        raise BadInput(
            "--rejection block needs --sampling probabilistic",
            "block verification weighs the draft's probabilities, which greedy drafting does not keep",
            "pass both, or neither",
        )
    if not 1 <= wish.context <= facts.context:
        raise BadInput(
            f"--context {wish.context} is beyond the draft", f"its window is {facts.context} tokens", "pass less"
        )
    if not 1 <= wish.draft_tokens <= facts.block_size:
        raise BadInput(
            f"--draft-tokens {wish.draft_tokens} does not fit the draft",
            f"one block proposes {facts.block_size} tokens, and verification then takes one row more",
            f"pass 1 to {facts.block_size}",
        )
    if engine.name == "sglang":
        return
    if wish.draft_tensor_parallel not in (1, wish.tensor_parallel):
        raise BadInput(
            f"--draft-tensor-parallel {wish.draft_tensor_parallel} is refused by {engine.title}",
            f"it takes 1 or the target's size, here {wish.tensor_parallel}",
            "pass one of these",
        )
    if facts.heads % wish.draft_tensor_parallel:
        raise BadInput(
            f"a draft tensor parallel size of {wish.draft_tensor_parallel} is impossible",
            f"the draft has {facts.heads} attention heads",
            "pass --draft-tensor-parallel 1",
        )


def _check_adaptive(wish: LaunchWish, engine: Engine) -> None:
    if not wish.adaptive or engine.name == "sglang":
        return
    for fault, option in (
        (wish.eager, "--eager"),
        (wish.pipeline_parallel > 1, "--pipeline-parallel"),
        (bool(wish.lengths), "a draft length for each batch size"),
    ):
        if fault:
            raise BadInput(
                f"--adaptive does not go with {option}",
                "adaptive verification replays full graphs of one stage and chooses the lengths itself",
                "leave one of the two out",
            )


def _check_lengths(wish: LaunchWish) -> None:
    expected = 1
    for start, end, length in wish.lengths:
        if start != expected or end < start or not 0 <= length <= wish.draft_tokens:
            raise BadInput(
                f"the draft lengths by batch size are {list(wish.lengths)}",
                f"ranges must follow each other from 1 on, with lengths from 0 to {wish.draft_tokens}",
                "write them with k3dspark tune --into",
            )
        expected = end + 1


_RELEVANT: Final[Mapping[str, Callable[[LaunchWish], bool]]] = {
    "prefix_cache_acceptance": lambda wish: wish.prefix_caching,
    "index_cache": lambda wish: wish.prefix_caching,
    "long_context": lambda wish: wish.context > 16384,
    "kv_padding": lambda wish: wish.context > 262144,
    "quarot": lambda wish: bool(wish.quantization),
    "int8_cache": lambda wish: bool(wish.quantization),
    "method_must_be_named": lambda wish: False,  # the files name it
    "remote_code": lambda wish: not wish.trust_remote_code and wish.device == "cuda",
    "launch_at_concurrency_1": lambda wish: wish.sequences == 1,
}


def _warnings(wish: LaunchWish, engine: Engine) -> Iterable[Hazard]:
    for hazard in engine.known_hazards(wish.version):
        if _RELEVANT.get(hazard.id, lambda _: True)(wish):
            yield hazard
    for feature in wish.build_has:
        yield Hazard(
            f"build_has.{feature}",
            f"no release of {engine.title} {wish.version} is known to have: {FEATURES[feature]}",
            "the files rely on your own build; watch its log with k3dspark launch",
            engine.support(feature).source,
        )
