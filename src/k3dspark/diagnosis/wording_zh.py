"""诊断的中文文本：每种形状的标题与证据，每个原因及其判定方法。"""

from __future__ import annotations

from typing import Final

LABELS: Final = {
    "nothing": "未发现问题",
    "nothing_judged": "无法判断：证据太少",
    "causes": "可能的原因（按可能性排序）",
    "test": "判定",
    "unjudged": "未判断",
}
COLUMNS: Final = ("", "原因", "判定方法")

SHAPES: Final = {
    "not_drafting": ("有词元生成，但没有投机", "窗口内生成 {tokens:,.0f} 个词元，草稿词元一个也没有"),
    "exactly_one": ("一个也没有被接受", "接受长度 {length:.3f}"),
    "fewer_proposals": ("提议数少于训练块长", "每轮 {number:.0f} 个草稿词元；该草稿按 {block:.0f} 个训练"),
    "more_proposals": ("提议数多于训练块长", "每轮 {number:.0f} 个草稿词元；该草稿按 {block:.0f} 个训练"),
    "collapse_after_first": (
        "第 1 个位置正常，随后崩塌",
        "第 1 个位置在 {first:.0%} 的轮次中保留，其中第 2 个位置只保留 {second:.0%}",
    ),
    "collapse_at_slot": (
        "在某个位置崩塌",
        "前一位置保留的轮次中，第 {slot:.0f} 个位置只保留 {share:.0%}；此前为 {before:.0%}",
    ),
    "all_slots_low": ("各位置普遍偏低", "接受长度 {length:.2f}，预期 {expected:.2f}，没有哪个位置特别异常"),
    "below_break_even": (
        "有接受，但不够回本",
        "接受长度 {length:.2f}，盈亏平衡点 {break_even:.2f}（{basis}）：该负载下不用草稿更快",
    ),
    "dead_beyond": (
        "短上下文正常，超过某长度后失效",
        "上下文小于 {at:,.0f} 词元时长度 {before:.2f}，此后为 {after:.2f}",
    ),
    "falls_with_context": (
        "随上下文变长而下降",
        "上下文小于 {until:,.0f} 词元时长度 {short:.2f}，自 {beyond:,.0f} 起为 {long:.2f}",
    ),
    "warm_worse": ("前缀缓存命中时反而更差", "上下文长度相近时，未命中长度 {cold:.2f}，命中长度 {warm:.2f}"),
    "ranks_differ": ("各 rank 不一致", "{low_name} 为 {low:.2f}，{high_name} 为 {high:.2f}"),
    "slots_do_not_add_up": ("按位置的数字有遗漏", "1 + 各位置之和为 {slots:.2f}，接受长度为 {length:.2f}；以后者为准"),
}

CAUSES: Final = {
    "no_configuration": ("引擎启动时没有投机配置", "命令行与启动日志"),
    "switched_off": ("投机被自动关闭：批量超限，或请求用了不支持的选项", "并发 1、贪心的普通请求"),
    "plain_server": ("这本来就是不带草稿的服务器", "访问的是哪个地址"),
    "statistics_off": ("没有导出投机统计", "/metrics 中的 spec_decode 指标；响应中的草稿字段"),
    "not_loaded": (
        "草稿权重没有加载：LFS 指针、dummy 格式、被跳过的张量名",
        "k3dspark inspect DRAFT --verify；引擎加载日志",
    ),
    "slots_read_early": (
        "位置读早了一格（speculators 约定），或通用架构名选错了模型类",
        "引擎日志中的架构名；更新引擎",
    ),
    "wrong_pair": ("草稿属于另一个目标模型，或词表、特殊词元不同", "k3dspark inspect DRAFT --target TARGET"),
    "wrong_taps": (
        "取用层错误（早一层或晚一层），或顺序不对",
        "vLLM 中的下标应为 target_layer_ids + 1；再用采集到的隐藏状态让草稿对照目标",
    ),
    "wrong_stream": (
        "取用流错误（前缀和与 AttnRes 混合），两者形状相同",
        "分别设置与不设置 VLLM_KIMI_K3_AUX_ATTN_RES_STREAM，比较接受率",
    ),
    "sampler": ("采样器全部拒绝：采样请求没有草稿概率，或算子有误", "同样的提示用贪心"),
    "width_given_as_proposals": (
        "引擎要校验宽度 8（锚点 + 7），却给了 7",
        "vLLM 取提议数，SGLang 与 TokenSpeed 取宽度",
    ),
    "chosen": ("为当前负载有意选择", "用 --block N 改变预期"),
    "proposals_given_as_width": ("引擎要 7 个提议，却给了校验宽度 8", "vLLM 取提议数，SGLang 与 TokenSpeed 取宽度"),
    "smaller_block": ("该草稿的块更小", "其 config.json 的 block_size"),
    "mask_shape": ("双向训练的块用了因果掩码，或相反", "草稿的 block_causal 与该引擎版本的做法"),
    "markov": ("Markov 头缺失、转置，或输入的词元不对", "加载日志中的 markov_head 张量"),
    "mask_token": ("mask token id 错误", "对照分词器：k3dspark inspect DRAFT --target TARGET"),
    "block_positions": ("块内位置没有接着上下文", "用采集到的隐藏状态让草稿对照目标"),
    "beyond_block": ("该位置超出训练块长", "config.json 的 block_size"),
    "cut_by_adaptation": ("自适应校验在此截断", "关闭自适应再测"),
    "query_rows": ("算子只处理有限的查询行", "减少一个草稿词元；换注意力后端"),
    "traffic": ("流量比预期更难：语言、领域、温度", "用已知提示集贪心运行时看 k3dspark monitor"),
    "yarn_scale": (
        "草稿的 YaRN 缩放丢失：K3 几何下应为 0.1309，丢失后为 0.0722",
        "k3dspark explain DRAFT；引擎读到的 mscale_all_dim",
    ),
    "precision": ("精度：目标或草稿被量化、草稿的 8 位缓存", "权重与缓存都用 bf16 跑同样的提示"),
    "too_many_tokens": ("对当前批量来说草稿词元太多", "减少，或按批量设置；各用 k3dspark monitor --plain-step-ms 比较"),
    "no_graph": ("起草或校验没有进图", "引擎日志：enforce_eager、图尺寸没有覆盖 batch × (K + 1)"),
    "slow_link": ("隐藏状态每轮经过慢链路", "k3dspark check 的链路项"),
    "experts_at_one": ("单请求时更多行唤醒更多专家", "提高并发再测"),
    "draft_limit": ("草稿单独的上限：其 max_model_len、缓存或位置表", "投机配置中的 max_model_len"),
    "yarn_missing": (
        "草稿没有应用 YaRN，或倍数与目标不同",
        "两者的 rope_parameters：k3dspark inspect DRAFT --target TARGET",
    ),
    "prefix_rows": (
        "从前缀缓存恢复的上下文在草稿缓存中没有行",
        "关闭前缀缓存跑同样的提示（vLLM：--no-enable-prefix-caching）",
    ),
    "not_trained_long": ("草稿没有在这么长的上下文上训练过", "每个长度五个提示，在另一引擎上测：曲线相同则是草稿本身"),
    "index_cache": ("引擎的索引缓存与草稿不兼容", "关闭该缓存再测"),
    "node_weights": ("某节点的权重或配置不同", "两边运行 k3dspark inspect DRAFT --verify"),
    "node_software": ("某节点的驱动、工具包或引擎不同", "两边的 k3dspark check --json 对比"),
    "routing": ("各 rank 的流量不同", "各 rank 的提示长度与前缀命中"),
    "device_fault": ("某设备计算错误", "设备健康状态；对该 rank 逐词元比对"),
    "rank_slots_uncounted": ("引擎只统计了部分数据并行 rank 的位置", "数据并行设为 1，或更新引擎"),
}

UNJUDGED: Final = {
    "too_few_rounds": "接受率：观察到的轮次不足 200；请延长观察（--interval）",
    "no_slots": "各位置的形状：该引擎不按位置计数",
    "no_break_even": "草稿是否回本：请给 --plain-step-ms 或 --plain URL",
    "no_context_lengths": "上下文长度：请给不同长度的响应（--requests FILE）",
    "no_warm_and_cold": "前缀缓存：请给命中与未命中的响应（--requests FILE）",
    "one_rank": "rank 之间的差异：只有一个 rank",
}

# -- 通过实验 --------------------------------------------------------------------------------------------------------

VERDICTS: Final = {
    "cause_found": "已找到原因",
    "nothing_wrong": "未发现问题",
    "unexplained": "几乎没有词元被接受，而以下改动都不是原因",
}
EXPERIMENT: Final = {
    "summary": "接受长度 {length:.2f}（{target} 的 {prompts} 个回答，{anchors:,} 个块）",
    "with_change": "改动后：{length:.2f}（{low:+.2f} 至 {high:+.2f}）",
    "judged": "已评判",
    "not_tried": "未尝试",
    "context_unused": "把抽取的隐藏状态全部置零，草稿也一样好：它没有读取目标模型",
}
EXPERIMENT_COLUMNS: Final = ("改动", "取值", "增益（奈特/词元）", "接受长度", "增益", "能恢复")
YES_NO: Final = ("否", "是")

CHANGES: Final = {
    "taps_early": (
        "抽取层早了一层",
        "每个抽取点后移一层：config.json 中的编号从 0 开始，取该层的输出（vLLM 的编号多 1）",
    ),
    "taps_late": ("抽取层晚了一层", "每个抽取点前移一层：从 1 开始计数的引擎编号不应写进 config.json"),
    "one_tap": ("有一个抽取点错了一层", "更正 target_layer_ids 中的这一项"),
    "tap_order": ("抽取的顺序与训练不同", "按层号升序拼接；或 context_proj 的列在转换时弄错了"),
    "tap_stream": (
        "抽取的是目标模型的另一条流",
        "把 aux_hidden_stream（vLLM 中为 VLLM_KIMI_K3_AUX_ATTN_RES_STREAM）设为此处给出的流",
    ),
    "positions_low": ("块内位置小了 1", "第 0 个槽位于锚点的位置，即上下文行数"),
    "positions_high": ("块内位置大了 1", "第 0 个槽位于锚点的位置，即上下文行数"),
    "yarn_missing": ("YaRN 未启用，而训练时启用了", "从来源恢复 rope_parameters"),
    "yarn_surplus": ("YaRN 已启用，而训练时没有", "从来源恢复 rope_parameters"),
    "yarn_scale": (
        "YaRN 的缩放与训练不同",
        "恢复 mscale 与 mscale_all_dim（公开值均为 1.0）；缩放只在 softmax 中应用一次",
    ),
    "rope_layout": (
        "旋转部分的行是另一种布局",
        "按 (2i, 2i+1) 成对旋转，或把 q_b_proj 与 kv_a_proj_with_mqa 的旋转行转换回来",
    ),
    "rope_theta": ("rope_theta 与训练不同", "从来源恢复 rope_theta"),
    "markov_wrong": ("Markov 头有害：它属于另一个草稿或另一个词表", "重新获取 markov_head；核对草稿词表（d2t）的顺序"),
    "markov_transposed": ("markov_w1 与 markov_w2 互换了", "换回来：w1 按词元读取，w2 给出偏置"),
    "block_mask": ("块内掩码与训练不同", "按此处给出的值设置 block_causal，并查看引擎该版本的行为"),
    "lm_head": ("草稿的 lm_head 不是目标模型的", "去掉 lm_head.safetensors，或重新获取"),
    "embedding": ("草稿的词嵌入不是目标模型的", "去掉 embed_tokens，或重新获取"),
    "mask_token": ("mask_token_id 与训练不同", "从来源恢复 mask_token_id"),
    "dtype": ("草稿因舍入损失接受率", "用更宽的格式运行草稿"),
}
NOT_TRIED: Final = {
    "no_such_layer": "会超出目标模型的层",
    "one_tap": "只有一个抽取点",
    "one_stream": "目标模型只有一条流",
    "has_yarn": "YaRN 已启用",
    "no_yarn": "YaRN 未启用",
    "markov_is_zero": "Markov 头已为零",
    "other_width": "目标模型的宽度不同",
    "is_the_targets": "已经是目标模型的",
    "is_fp32": "已用 float32 运行",
    "nothing_else": "没有其他取值可试",
}
