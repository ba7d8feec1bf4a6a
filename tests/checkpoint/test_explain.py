"""`explain`: every field in two languages, figures computed from the config at hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3dspark.checkpoint import explanations_en, explanations_zh
from k3dspark.checkpoint.explain import explain_config
from k3dspark.checkpoint.fields import FIELDS
from k3dspark.checkpoint.figures import figures
from k3dspark.checkpoint.published import published_config, tiny_config
from k3dspark.errors import BadInput

# The rows of the founding article's table, with something that each of them says.
SEED = {
    "architectures": ["模型类名", "K3DSparkModel", "框架版本"],
    "model_type": ["模型类型标识"],
    "hidden_size": ["隐藏层维度", "特征向量宽度"],
    "intermediate_size": ["FFN", "2 倍"],
    "num_hidden_layers": ["刻意为之", "层"],
    "num_attention_heads": ["注意力头", "数量"],
    "num_key_value_heads": ["与 Q 头相同", "低秩"],
    "q_lora_rank": ["低秩投影维度"],
    "kv_lora_rank": ["压缩表示", "2 × 头数 × 头维度", "显存节省非常可观"],
    "qk_nope_head_dim": ["不旋转", "NoPE"],
    "qk_rope_head_dim": ["旋转位置编码"],
    "v_head_dim": ["每头维度"],
    "mla_use_nope": ["NoPE 分支", "开关"],
    "mla_use_output_gate": ["输出门控", "开关"],
    "vocab_size": ["词表大小", "16 万"],
    "rms_norm_eps": ["数值稳定", "除零"],
    "max_position_embeddings": ["最大上下文", "100 万"],
    "rope_theta": ["基频"],
    "rope_parameters": ["对象", "长上下文"],
    "rope_parameters.rope_type": ["YaRN", "外推"],
    "rope_parameters.factor": ["外推倍数", "32768 × 32 = 1048576"],
    "rope_parameters.original_max_position_embeddings": ["原始", "32K", "较低精度代价", "1M"],
    "rope_parameters.beta_fast": ["频率插权", "快"],
    "rope_parameters.beta_slow": ["频率插权", "慢"],
    "rope_parameters.mscale": ["注意力缩放系数"],
    "rope_parameters.mscale_all_dim": ["注意力缩放系数"],
    "num_target_layers": ["取用"],
    "target_hidden_size": ["目标模型", "同宽"],
    "target_num_hidden_layers": ["总层数", "Kimi K3"],
    "target_layer_ids": ["接线图", "并非均匀", "语义与输出特征", "不独立工作", "接受率"],
    "mask_token_id": ["掩码 token", "占位符"],
    "bos_token_id": ["句子开始"],
    "eos_token_id": ["句子结束"],
    "pad_token_id": ["填充"],
    "markov_rank": ["低秩维度", "接受率"],
    "markov_head_type": ["标准版", "一阶马尔可夫", "计算代价低", "高频"],
    "enable_confidence_head": ["概率", "动态调整投机长度", "吞吐更稳"],
    "confidence_head_with_markov": ["与 Markov 头联合"],
    "tie_word_embeddings": ["不共享", "单独存放", "lm_head.safetensors"],
    "draft_vocab_size": ["与主词表一致"],
    "_torchspec_version": ["TorchSpec", "投机解码工具链"],
    "torch_dtype": ["bfloat16", "GPU/NPU"],
    "_converted_from": ["训练检查点"],
}


def test_every_row_of_the_founding_table_is_covered_in_chinese_and_says_no_less() -> None:
    explained = {field.name: field for field in explain_config(published_config(), "zh").fields}
    for name, sayings in SEED.items():
        field = explained[name]
        whole = field.meaning + field.decides + field.breaks
        assert [saying for saying in sayings if saying not in whole] == [], name


def test_both_languages_explain_the_same_fields() -> None:
    assert explanations_en.FIELDS.keys() == explanations_zh.FIELDS.keys()
    assert explanations_en.SECTIONS.keys() == explanations_zh.SECTIONS.keys()
    for texts in (*explanations_en.FIELDS.values(), *explanations_zh.FIELDS.values()):
        assert len(texts) == 3
        assert all(text.endswith(("。", ".", "。”")) for text in texts), texts


def test_every_known_field_but_aliases_is_explained() -> None:
    aliases = {"dtype", "rope_scaling", "dflash_config", "full_attention_causal"}
    assert {field.name for field in FIELDS} - aliases <= explanations_en.FIELDS.keys()


def test_every_field_of_the_published_file_is_shown_as_stated() -> None:
    shown = {f.name: f.value for f in explain_config(published_config()).fields if f.stated and "." not in f.name}
    assert shown == published_config()


def test_figures_of_the_published_draft() -> None:
    values = {figure.name: figure.value for figure in figures(published_config())}
    assert values == pytest.approx(
        {
            "parameters": 3_562_312_961,
            "parameters_without_embedding": 2_387_907_841,
            "model_file_bytes": 7_124_633_402,
            "lm_head_file_bytes": 2_348_810_336,
            "weights_bytes": 9_473_436_162,
            "kv_bytes_per_token": 5_760,
            "kv_bytes_per_token_without_mla": 204_800,
            "kv_saving": 204_800 / 5_760,
            "kv_bytes_at_full_context": 6_039_797_760,
            "hidden_bytes_per_verified_token": 71_680,
            "hidden_bytes_per_round": 573_440,
            "markov_bytes_per_step": 83_886_080,
            "softmax_scale": 0.1308608,
            "rope_multiplier": 1.0,
            "context_window": 1_048_576,
        }
    )


@pytest.mark.parametrize("config", [published_config(), tiny_config()], ids=["published", "tiny"])
def test_the_arithmetic_shown_gives_the_value_shown(config: dict[str, Any]) -> None:
    for figure in figures(config):
        text = figure.arithmetic.replace("×", "*").replace("−", "-").replace("block_size", "7")
        text = text.replace("header ", "").replace("data ", "")
        if set(text) <= set("0123456789 +-*/()."):
            assert eval(text) == pytest.approx(figure.value), figure


def test_the_figures_follow_the_config() -> None:
    values = {figure.name: figure.value for figure in figures({**published_config(), "num_hidden_layers": 3})}
    assert values["kv_bytes_per_token"] == 3 * 576 * 2


def test_one_field_is_found_by_its_short_name_too() -> None:
    assert [f.name for f in explain_config(published_config(), field="factor").fields] == ["rope_parameters.factor"]
    assert [f.name for f in explain_config(published_config(), field="dtype").fields] == ["torch_dtype"]


def test_an_unknown_field_is_an_error_that_suggests_one() -> None:
    with pytest.raises(BadInput, match="kv_lora_rank"):
        explain_config(published_config(), field="kv_lora_rnk")


def test_a_wrong_value_is_shown_with_its_problem_and_stops_the_figures() -> None:
    explained = explain_config({**published_config(), "hidden_size": "wide"})
    problem = next(field for field in explained.fields if field.name == "hidden_size")
    assert problem.problem == 'it is the string "wide"'
    assert explained.figures == ()
    assert explained.unusable is not None


def test_unknown_keys_are_listed() -> None:
    assert explain_config({**published_config(), "more": 1}).unknown == ("more",)


@given(
    st.dictionaries(
        st.sampled_from([f.name for f in FIELDS]),
        st.none() | st.integers() | st.text() | st.lists(st.integers()) | st.dictionaries(st.text(), st.integers()),
    )
)
def test_any_config_can_be_explained(config: dict[str, Any]) -> None:
    explained = explain_config(config, "zh")
    json.dumps([field.value for field in explained.fields])
    explain_config({**published_config(), **config})
