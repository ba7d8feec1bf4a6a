"""`k3dspark explain`: config.json field by field, in English or Chinese."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3dspark.cli.output import clean, print_json

if TYPE_CHECKING:
    from k3dspark.checkpoint.explain import ExplainedConfig
    from k3dspark.checkpoint.figures import Figure


class Lang(StrEnum):
    """Languages that the explanations are written in."""

    EN = "en"
    ZH = "zh"


_WORDS = {
    "en": {
        "meaning": "means",
        "decides": "decides",
        "breaks": "if wrong",
        "default": "not stated; the default",
        "absent": "not stated",
        "problem": "wrong here",
        "figures": "What follows from it",
        "unknown": "Other keys, kept as they are",
        "unusable": "No figures can be computed while a field is wrong",
        "published": "No directory given: this is the published Kimi-K3-DSpark-MLA-NPU config.",
    },
    "zh": {
        "meaning": "含义",
        "decides": "决定",
        "breaks": "写错",
        "default": "未写，取默认值",
        "absent": "未写",
        "problem": "此处有误",
        "figures": "由此算出",
        "unknown": "其他字段，原样保留",
        "unusable": "有字段写错，无法计算派生数值",
        "published": "未给目录：以下是发布的 Kimi-K3-DSpark-MLA-NPU 的配置。",
    },
}
_FIGURES = {
    "parameters": ("parameters of model.safetensors", "model.safetensors 的参数量"),
    "parameters_without_embedding": ("of them trained (without the embedding)", "其中可训练的（不含词嵌入）"),
    "model_file_bytes": ("model.safetensors", "model.safetensors 大小"),
    "lm_head_file_bytes": ("lm_head.safetensors", "lm_head.safetensors 大小"),
    "weights_bytes": ("weights in memory", "权重占用内存"),
    "kv_bytes_per_token": ("KV cache per token", "每个 token 的 KV 缓存"),
    "kv_bytes_per_token_without_mla": ("the same with full multi-head attention", "若用完整多头注意力（MHA）"),
    "kv_saving": ("saved by MLA", "MLA 节省"),
    "kv_bytes_at_full_context": ("KV cache at the full context", "最大上下文时的 KV 缓存"),
    "hidden_bytes_per_verified_token": ("hidden state per verified token", "每个被验证 token 传递的隐藏状态"),
    "hidden_bytes_per_round": ("hidden state per round", "每轮传递的隐藏状态"),
    "markov_bytes_per_step": ("read by the Markov head per step", "Markov 头每步读取"),
    "softmax_scale": ("softmax scale", "softmax 缩放"),
    "rope_multiplier": ("multiplier of the cos/sin table", "cos/sin 表的乘数"),
    "context_window": ("context window", "上下文窗口"),
}


def explain(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="A draft's directory or config.json.", show_default="published"),
    ] = None,
    field: Annotated[str | None, typer.Option(metavar="NAME", help="Explain this field only.")] = None,
    lang: Annotated[Lang, typer.Option(help="Language of the explanations.")] = Lang.EN,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Explain config.json: each value, what it means, what it decides, and what breaks when it is wrong."""
    from k3dspark.checkpoint.explain import explain_config
    from k3dspark.checkpoint.jsonfile import read_config
    from k3dspark.checkpoint.published import published_config

    config = published_config() if directory is None else read_config(directory)
    explained = explain_config(config, lang.value, field)
    if as_json:
        print_json(_as_json(explained, directory, lang))
    else:
        _print(explained, lang.value, directory is None, with_figures=field is None)


def _as_json(explained: ExplainedConfig, directory: Path | None, lang: Lang) -> dict[str, Any]:
    return {
        "format": 1,
        "directory": None if directory is None else str(directory),
        "lang": lang.value,
        "fields": [asdict(field) for field in explained.fields],
        "unknown": list(explained.unknown),
        "figures": [{**asdict(figure), "label": _label(figure, lang.value)} for figure in explained.figures],
        "unusable": explained.unusable,
    }


def _label(figure: Figure, lang: str) -> str:
    return _FIGURES[figure.name][lang == "zh"]


def _print(explained: ExplainedConfig, lang: str, published: bool, with_figures: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    words = _WORDS[lang]
    console = Console(highlight=False)
    if published and with_figures:
        console.print(words["published"])
    # One text printed once: rich takes its time over each print.
    console.print(Text.assemble(*_paragraphs(explained, words)), soft_wrap=True)
    if not with_figures:
        return
    if explained.unknown:
        console.print(Text(f"{words['unknown']}: {clean(', '.join(explained.unknown))}\n", "dim"), soft_wrap=True)
    console.print(Text(words["figures"], "bold underline"))
    if explained.unusable is not None:
        console.print(Text(f"{words['unusable']}: {clean(explained.unusable)}", "bold red"), soft_wrap=True)
    _print_figures(console, explained, lang)


def _paragraphs(explained: ExplainedConfig, words: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(text, style) pieces of every field."""
    section = None
    for field in explained.fields:
        if field.section != section:
            section = field.section
            yield f"\n{explained.sections[section]}\n", "bold underline"
        yield f"\n{field.name}", "bold cyan"
        if field.value is not None:
            yield f" = {clean(json.dumps(field.value, ensure_ascii=False))}", ""
        if not field.stated:
            yield f"  ({words['absent' if field.value is None else 'default']})", "dim"
        for name in ("meaning", "decides", "breaks"):
            yield f"\n  {words[name]}: ", "dim"
            yield getattr(field, name), ""
        if field.problem is not None:
            yield f"\n  {words['problem']}: ", "bold red"
            yield clean(field.problem), ""
        yield "\n", ""


def _print_figures(console: Any, explained: ExplainedConfig, lang: str) -> None:
    from k3dspark.cli.output import table

    rows = table(("", "left"), ("", "right"), ("", "left"), ("", "left"))
    rows.show_header = False
    for figure in explained.figures:
        value = f"{figure.value:,}" if isinstance(figure.value, int) else f"{figure.value:,.7g}"
        rows.add_row(_label(figure, lang), value, figure.unit, f"= {figure.arithmetic}")
    console.print(rows)
