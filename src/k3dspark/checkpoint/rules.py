"""What must hold in a draft's config.json, as one table; `evaluate` turns a mapping into verdicts.

A rule whose fields are already known to be wrong is skipped: one fault gives one failing verdict, not a dozen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from k3dspark.checkpoint import rule_checks as checks
from k3dspark.checkpoint.fields import (
    FIELDS,
    ROPE_FIELDS,
    Field,
    rope_parameters,
)
from k3dspark.errors import BadInput

Severity = Literal["error", "warning"]
Status = Literal["pass", "fail", "warn", "skip"]
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """One thing that must hold. `fields` are what it reads, the first being the one a failure is blamed on.

    `check` returns what was found instead, or None when the rule holds; it runs only when `applies` and when every
    field it reads is well-formed. `blame` names another of the fields where the config itself tells which is wrong.
    """

    id: str
    fields: tuple[str, ...]
    must: str
    consequence: str
    remedy: str
    check: Callable[[Config], str | None]
    severity: Severity = "error"
    applies: Callable[[Config], bool] = lambda config: True
    blame: Callable[[Config], str] | None = None

    @property
    def field(self) -> str:
        return self.fields[0]


@dataclass(frozen=True)
class Verdict:
    """How one rule came out; `found` says what was there when it did not hold, or why it was skipped."""

    rule: Rule
    status: Status
    found: str = ""
    field: str = ""


def evaluate(config: Config) -> tuple[Verdict, ...]:
    """Every rule with its verdict, in table order. Never raises, whatever the values are."""
    bad: set[str] = set()
    verdicts = []
    for rule in RULES:
        broken = [name for name in rule.fields if name in bad]
        if broken:
            verdicts.append(Verdict(rule, "skip", f"{broken[0]} is already wrong", rule.field))
        elif not rule.applies(config):
            verdicts.append(Verdict(rule, "skip", "does not apply to this config", rule.field))
        elif (found := rule.check(config)) is None:
            verdicts.append(Verdict(rule, "pass", field=rule.field))
        else:
            field = rule.blame(config) if rule.blame else rule.field
            verdicts.append(Verdict(rule, "fail" if rule.severity == "error" else "warn", found, field))
            if rule.severity == "error":
                bad.add(field)
    return tuple(verdicts)


def require(config: Config, source: str = "config") -> None:
    """Raise `BadInput` for the first rule that fails; warnings pass."""
    for verdict in evaluate(config):
        if verdict.status == "fail":
            raise BadInput(*explain(verdict, source))


def explain(verdict: Verdict, source: str) -> tuple[str, str, str]:
    """(what, why, remedy) of a verdict that did not hold."""
    rule = verdict.rule
    return f"{source}: {verdict.field}: {verdict.found}", f"{rule.must}; {rule.consequence}", rule.remedy


def _kind_rules() -> Iterator[Rule]:
    for field in FIELDS:
        yield Rule(
            id=f"kind.{field.name}",
            fields=(field.name,),
            must=f"it must be {field.must()}",
            consequence="without it the draft network cannot be built as it was trained",
            remedy="take config.json again from where the weights came from",
            check=_kind_check(field, lambda config: config),
        )
    for field in ROPE_FIELDS:
        yield Rule(
            id=f"kind.rope_parameters.{field.name}",
            fields=(f"rope_parameters.{field.name}", "rope_parameters", "rope_scaling"),
            must=f"it must be {field.must()}",
            consequence="positions would be rotated otherwise than in training",
            remedy="take the rope_parameters block again from where the weights came from",
            check=_kind_check(field, rope_parameters),
        )


def _kind_check(field: Field, scope: Callable[[Config], Config]) -> Callable[[Config], str | None]:
    def check(config: Config) -> str | None:
        value = scope(config).get(field.name)
        # Absent and null are one for a field with a default: transformers writes null for what was never set.
        if value is None:
            return None if not field.required else "it is missing" if field.name not in scope(config) else "it is null"
        return field.wrong(value)

    return check


_FROM_SOURCE: Final = "take config.json again from where the weights came from"

RULES: Final[tuple[Rule, ...]] = (
    *_kind_rules(),
    Rule(
        "heads.kv",
        ("num_key_value_heads", "num_attention_heads"),
        "it must equal num_attention_heads",
        "MLA shares one latent among all heads and has no grouped keys; another value is another network",
        _FROM_SOURCE,
        checks.kv_heads,
    ),
    Rule(
        "heads.rope_even",
        ("qk_rope_head_dim",),
        "it must be even",
        "rotary positions turn pairs of numbers",
        _FROM_SOURCE,
        checks.even,
    ),
    Rule(
        "mla.nope",
        ("mla_use_nope",),
        "it must be false",
        "the draft rotates its positions; true is the target's variant, loads without complaint and loses acceptance",
        "set it to false, as in the published config.json",
        checks.off("mla_use_nope"),
    ),
    Rule(
        "mla.output_gate",
        ("mla_use_output_gate",),
        "it must be false",
        "the gate needs a g_proj tensor in each layer, which this kind of draft does not have",
        "set it to false, as in the published config.json",
        checks.off("mla_use_output_gate"),
    ),
    Rule(
        "rope.theta_stated",
        ("rope_theta", "rope_parameters", "rope_parameters.rope_theta"),
        "it must be stated, there or in rope_parameters",
        "a class default (10000) would rotate every position wrongly",
        "add rope_theta; the published value is 50000.0",
        checks.theta_stated,
    ),
    Rule(
        "rope.theta_agrees",
        ("rope_theta", "rope_parameters", "rope_parameters.rope_theta"),
        "it must equal rope_parameters.rope_theta",
        "engines read one or the other, and would rotate differently",
        "give both the value that training used; the published value is 50000.0",
        checks.theta_agrees,
    ),
    *(
        Rule(
            f"rope.yarn_{name}",
            (f"rope_parameters.{name}", "rope_parameters", "rope_parameters.rope_type"),
            "YaRN needs it",
            consequence,
            f"add it to rope_parameters; the published value is {published}",
            checks.yarn_has(name),
            applies=checks.yarn,
        )
        for name, published, consequence in (
            ("factor", "32.0", "positions past the original length cannot be placed"),
            ("original_max_position_embeddings", "32768", "the frequency bands cannot be placed"),
            ("mscale", "1.0", "engines then disagree about the multiplier of the cos/sin table"),
            (
                "mscale_all_dim",
                "1.0",
                "generic code then takes 0: softmax scale 0.0722 instead of 0.1309, and it loads and runs, wrong",
            ),
        )
    ),
    Rule(
        "rope.product",
        (
            "rope_parameters.factor",
            "rope_parameters.original_max_position_embeddings",
            "max_position_embeddings",
            "rope_parameters",
            "rope_parameters.rope_type",
        ),
        "factor × original_max_position_embeddings must equal max_position_embeddings",
        "the frequencies would not be those of training, and acceptance falls with the length of the context",
        "restore all three; published: 32.0 × 32768 = 1048576",
        checks.product,
        applies=checks.yarn,
        blame=checks.product_blame,
    ),
    Rule(
        "rope.betas",
        ("rope_parameters.beta_fast", "rope_parameters.beta_slow", "rope_parameters", "rope_parameters.rope_type"),
        "beta_fast must be above beta_slow",
        "the ramp between the two frequency bands would run backwards",
        "restore both; published: 32 and 1",
        checks.betas,
        applies=checks.yarn,
    ),
    Rule(
        "taps.in_range",
        ("target_layer_ids", "target_num_hidden_layers"),
        "every layer must exist in the target (0-based)",
        "there is no hidden state to take",
        _FROM_SOURCE + "; do not add one to the ids, engines do that themselves where they need it",
        checks.taps_in_range,
    ),
    Rule(
        "taps.distinct",
        ("target_layer_ids",),
        "no layer may stand there twice",
        "context_proj was trained on different layers; a doubled one feeds it the wrong state",
        _FROM_SOURCE,
        checks.taps_distinct,
    ),
    Rule(
        "taps.sorted",
        ("target_layer_ids",),
        "the layers must ascend",
        "taps are concatenated in ascending order; another order feeds every column block the wrong layer",
        _FROM_SOURCE,
        checks.taps_sorted,
    ),
    Rule(
        "taps.count",
        ("target_layer_ids", "num_target_layers"),
        "it must hold num_target_layers layers",
        "context_proj has one column block for each tap",
        _FROM_SOURCE,
        checks.taps_counted,
    ),
    *(
        Rule(
            f"ids.{name}",
            (f"{name}_token_id", "vocab_size"),
            "it must lie within the vocabulary",
            "its embedding row does not exist",
            _FROM_SOURCE,
            checks.in_vocabulary(f"{name}_token_id"),
        )
        for name in ("mask", "bos", "eos", "pad")
    ),
    Rule(
        "ids.mask_agrees",
        ("mask_token_id", "dflash_config"),
        "it must equal dflash_config.mask_token_id where that is stated",
        "engines read one or the other, and slots after the first would see another token",
        _FROM_SOURCE,
        checks.mask_agrees,
    ),
    Rule(
        "ids.mask_own",
        ("mask_token_id", "bos_token_id", "eos_token_id", "pad_token_id"),
        "it should be a token of its own",
        "an id shared with a real token usually is a wrong id, and costs acceptance at every slot but the first",
        "compare with the published config.json (163837)",
        checks.mask_is_own,
        severity="warning",
    ),
    Rule(
        "vocabulary.draft",
        ("draft_vocab_size", "vocab_size"),
        "it must not exceed vocab_size",
        "the draft would propose tokens that the target does not have",
        _FROM_SOURCE,
        checks.draft_vocabulary,
    ),
    Rule(
        "dtype.agrees",
        ("torch_dtype", "dtype"),
        "it must equal dtype where both are stated",
        "engines read one or the other",
        "keep the one that the weights have",
        checks.dtype_agrees,
    ),
    Rule(
        "embeddings.shared",
        ("share_target_embeddings", "hidden_size", "target_hidden_size"),
        "sharing the target's embeddings needs equal widths",
        "the target's embedding rows do not fit the draft's layers",
        "store embed_tokens and lm_head with the draft instead",
        checks.shared,
        applies=lambda config: bool(config.get("share_target_embeddings")),
    ),
    Rule(
        "architectures.stated",
        ("architectures",),
        "it should name the model class",
        "vLLM and SGLang choose the class by it, and end with an IndexError or TypeError where it is missing",
        'add "architectures": ["K3DSparkModel"] to config.json',
        lambda config: None if config.get("architectures") else "it is empty or missing",
        severity="warning",
    ),
    Rule(
        "block.causality_stated",
        ("block_causal", "num_hidden_layers", "dflash_config", "full_attention_causal"),
        "a draft of other than 5 layers should state it",
        "the public 3-layer drafts are causal, and the wrong mask costs about a token of acceptance length",
        "add block_causal to config.json as the model was trained",
        checks.causality_stated,
        severity="warning",
    ),
)
