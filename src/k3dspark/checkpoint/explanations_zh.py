"""config.json 各字段的中文说明：含义、决定什么、写错会怎样。"""

from __future__ import annotations

from typing import Final

SECTIONS: Final[dict[str, str]] = {
    "architecture": "基础架构",
    "attention": "MLA 注意力",
    "positions": "RoPE 与 YaRN：100 万上下文",
    "target": "与目标模型对齐",
    "heads": "Markov 头与置信度头",
    "tokens": "特殊 token 与词表",
    "metadata": "元数据",
    "switches": "开关（发布的文件里没有写，取默认值）",
}

FIELDS: Final[dict[str, tuple[str, str, str]]] = {
    "architectures": (
        "模型类名，推理框架据此找到对应的实现。",
        "框架加载哪一个类：K3DSparkModel。",
        "报“K3DSparkModel 未定义”说明框架版本太旧，不认识这个架构，升级框架；缺省时按 K3DSparkModel 处理，"
        "但有的框架必须写明；写成通用类名会被路由到别的模型类。",
    ),
    "model_type": (
        "模型类型标识符，transformers 与各推理框架据此选择配置类。",
        "用哪一套字段规则读这个文件。",
        "不是 k3_dspark 就不是这种草稿模型，本工具拒绝加载。",
    ),
    "hidden_size": (
        "隐藏层维度，每个 token 的特征向量宽度。",
        "几乎所有张量的一条边，也是 lm_head 与词嵌入的宽度：lm_head 文件 = 词表 × 隐藏维度 × 2 字节 + 文件头。",
        "张量形状对不上，严格加载时报错；与目标模型不同宽时不能共用目标的词嵌入和 lm_head。",
    ),
    "intermediate_size": (
        "前馈网络（FFN）中间层维度，SwiGLU 的 gate、up、down 三个矩阵的另一条边。",
        "每层参数和计算的大头；发布的模型正好是隐藏层的 2 倍。",
        "mlp 张量形状对不上。",
    ),
    "num_hidden_layers": (
        "草稿模型的层数。层数少不是缩水，而是刻意为之：投机解码里草稿要跑得飞快，才能帮主模型省时间。",
        "草稿一次前向的耗时、权重大小，以及上下文缓存里每个 token 有几行。",
        "多写或少写一层，就缺或多一层的 12 个张量。",
    ),
    "num_attention_heads": (
        "注意力头（Q 头）的数量。",
        "q_b_proj、kv_b_proj、o_proj 的形状。每个头占其中连续的一段行，先不旋转部分后旋转部分，顺序不能换。",
        "形状对不上；形状碰巧对得上而头的排列不同，就是能加载、能运行的乱码。",
    ),
    "num_key_value_heads": (
        "KV 头数量，与 Q 头相同：MLA 的压缩靠低秩潜向量，不靠减少 KV 头（GQA）。",
        "没有张量由它单独决定；它声明这不是 GQA 草稿。",
        "与 num_attention_heads 不等说明这是另一种网络（例如 RadixArk 的 64/16 GQA 草稿），本工具不运行。",
    ),
    "vocab_size": (
        "词表大小，约 16 万词元（发布的模型）。",
        "词嵌入、markov_w1 和 lm_head 的行数；必须与目标模型逐个 id 一致。",
        "与目标不同则 token id 的意义不同；lm_head 的行错位会让输出全错。",
    ),
    "rms_norm_eps": (
        "RMSNorm 的数值稳定项，防止除零。",
        "所有归一化（包括 q_a、kv_a 的归一化）的精度；方差用 fp32 计算。",
        "写成别的默认值（如 1e-6）照样运行，但与训练不一致，接受率损失 0–2 %。",
    ),
    "q_lora_rank": (
        "Q 向量的低秩投影维度：先压到这个宽度并归一化，再展开到所有头。",
        "q_a_proj 的输出与 q_b_proj 的输入宽度。",
        "形状对不上；为空（不压缩）时 vLLM 等框架拒绝。",
    ),
    "kv_lora_rank": (
        "KV 的压缩表示维度：缓存里每层每个 token 只存这么宽的潜向量，再加旋转部分的键。传统 MHA 的 KV 缓存按"
        " 2 × 头数 × 头维度 × 序列长度增长，MLA 把它压进低秩空间，长上下文时显存节省非常可观，“MLA”之名由此而来。",
        "KV 缓存的大小；吸收形式下注意力的宽度 kv_lora_rank + qk_rope_head_dim。",
        "kv_a、kv_b 的形状对不上；推理框架的 MLA 算子通常只支持固定的 512 + 64。",
    ),
    "qk_nope_head_dim": (
        "Q/K 每个头里不旋转（NoPE）部分的维度。",
        "与 qk_rope_head_dim 相加得到 192，softmax 缩放按这个和的 −1/2 次方计算，吸收形式下也一样（绝不是 576）。",
        "缩放错误：能加载、能运行，接受率下降。",
    ),
    "qk_rope_head_dim": (
        "Q/K 每个头里施加旋转位置编码的维度；键的这一部分由所有头共享。",
        "旋转的维数，必须是偶数。旋转是交错式：第 2i 与 2i+1 个数为一对。",
        "按前后两半（NeoX 式）旋转，第 0 个位置完全正确，距离越远错得越多。",
    ),
    "v_head_dim": (
        "V 的每头维度。",
        "kv_b_proj 每头的后一段行数与 o_proj 的输入宽度。",
        "形状对不上；键段与值段取反则输出是乱码。",
    ),
    "mla_use_nope": (
        "NoPE 分支开关：为 true 时旋转部分的维度保留但不旋转（Kimi K3 主模型如此）。草稿为 false，要旋转。",
        "草稿的注意力是否知道位置。",
        "张量形状两种情况完全相同，所以写错是无声的：能加载、能运行，接受率大跌。本工具与 vLLM 都拒绝 true。",
    ),
    "mla_use_output_gate": (
        "输出门控开关：为 true 时每层多一个 g_proj，注意力输出先乘 sigmoid 门再进 o_proj（主模型如此）。草稿为 false。",
        "每层有没有 g_proj 张量。",
        "true 而文件里没有 g_proj，就缺张量；本工具与 vLLM 都拒绝 true。",
    ),
    "max_position_embeddings": (
        "最大上下文长度，单位 token；发布的模型是 100 万（1048576）。",
        "位置的上限，也是 YaRN 外推后的窗口：应等于 factor × original_max_position_embeddings。",
        "改小会过早截断；改大不会让模型真的支持更长。公开测试里约 10 万 token 以上接受率就明显下降。",
    ),
    "rope_theta": (
        "RoPE 位置编码的基频。",
        "每一对维度的旋转频率；顶层与 rope_parameters 里各写一次，两处必须相同。",
        "落到默认值 10000 时能加载、能运行，远距离的位置全部错位。",
    ),
    "rope_parameters": (
        "RoPE 设置的对象：下面八个字段。旧文件叫 rope_scaling，字段 type 即 rope_type。",
        "位置编码的全部参数；部署时须与训练（以及主模型的约定）完全一致。",
        "长上下文输出质量突然变差，先核对这里的 factor 与 original_max_position_embeddings。",
    ),
    "rope_parameters.rope_type": (
        "长上下文外推方案：yarn 即 YaRN；default 即普通 RoPE。",
        "频率是否按 YaRN 插值，softmax 缩放是否带 mscale 的平方。",
        "忽略 YaRN 时短文本几乎看不出，越长越差。",
    ),
    "rope_parameters.rope_theta": (
        "与顶层的 rope_theta 相同的基频。",
        "新版框架读这里，旧版读顶层。",
        "两处不同，不同框架就旋转得不同。",
    ),
    "rope_parameters.factor": (
        "外推倍数：原生长度乘以它就是最大上下文，32768 × 32 = 1048576（发布的模型）。",
        "低频维度的插值程度，以及 mscale 的值 0.1·ln(factor)+1。",
        "32 写成 16：频率与 softmax 缩放都变，能加载、能运行，接受率随长度下降。",
    ),
    "rope_parameters.original_max_position_embeddings": (
        "外推前的原始上下文长度：模型原生支持 32K，YaRN 以较低精度代价平滑外推到 1M。",
        "哪些维度外推、哪些插值的分界。",
        "分界错位，长文本位置编码错位。",
    ),
    "rope_parameters.beta_fast": (
        "YaRN 频率插权的快端：转得比它快的维度不插值。",
        "过渡带的起点（发布的模型是第 15 对）。",
        "过渡带移动，中等距离的位置略错。",
    ),
    "rope_parameters.beta_slow": (
        "YaRN 频率插权的慢端：转得比它慢的维度完全插值。",
        "过渡带的终点（发布的模型是第 26 对）。",
        "过渡带移动；大于或等于 beta_fast 则方向颠倒。",
    ),
    "rope_parameters.mscale": (
        "YaRN 注意力缩放系数之一：除以 mscale_all_dim 的那份得到 cos/sin 表的乘数。",
        "cos/sin 表的乘数；两个系数相同，乘数为 1。",
        "缺失时各框架取不同默认值，旋转部分被放大而不旋转部分不变。",
    ),
    "rope_parameters.mscale_all_dim": (
        "YaRN 注意力缩放系数之二：它的平方乘进 softmax 缩放。",
        "softmax 缩放 σ = 192^(−1/2) · m²。修正只能做一次：要么乘进 σ，要么乘进 q。",
        "转换配置时丢了它，通用代码取 0：σ 从 0.1309 变成 0.0722，cos/sin 乘数变成 1.3466；能加载、能运行，是错的。",
    ),
    "num_target_layers": (
        "从目标模型取用几层的隐藏状态。",
        "context_proj 的输入宽度：每个取用层一段列。",
        "必须等于 target_layer_ids 的个数。",
    ),
    "target_hidden_size": (
        "目标模型的隐藏层维度；发布的草稿与它同宽。",
        "context_proj 输入里每一段的宽度，也是每个被验证 token 要传递的隐藏状态大小。",
        "与目标不符则隐藏状态接不进来。",
    ),
    "target_num_hidden_layers": (
        "目标模型（Kimi K3 主模型）的总层数。",
        "target_layer_ids 的合法范围。",
        "与实际目标不符，说明目标模型不是训练时的那个。",
    ),
    "target_layer_ids": (
        "投机解码的“接线图”：草稿不独立工作，而是取目标模型这些层（从 0 数）输出的隐藏状态，按升序拼接后作为输入。"
        "选层并非均匀：靠前一层、中段几层与末段一层兼顾语义与输出特征，让几层的草稿也能给出高接受率。"
        "它们一起进入 context_proj，不是草稿每层对应一层。",
        "草稿看到的一切上下文。Inferact 系取 AttnRes 的原始前缀和；vLLM 内部的编号要加 1，由框架自己加。",
        "差一层，接受率从五成以上掉到 3–10 %；顺序打乱接近零。接受率低时最先核对这里。",
    ),
    "mask_token_id": (
        "掩码 token：草稿块里除第一个槽位（锚点）外的占位符，一个未使用的保留 id。",
        "第 2 个及以后槽位的输入嵌入行。",
        "写成别的 id（如 163605、163824、pad），只有第一个草稿 token 正常，后面的接受率下降。",
    ),
    "bos_token_id": (
        "句子开始标记。",
        "不进入草稿的计算；必须与目标的 tokenizer 一致。",
        "与目标不一致，说明拿错了 tokenizer 或目标。",
    ),
    "eos_token_id": (
        "句子结束标记；Kimi K3 聊天的停止标记是 163586（<|end_of_msg|>），不是 163585（[EOS]）。",
        "生成在哪里停；可以是一个 id 或一个列表。",
        "停不下来或提前停；草稿在停止标记之后的 token 应丢弃。",
    ),
    "pad_token_id": (
        "填充 token。",
        "批处理对齐；不进入草稿的计算。",
        "不应与掩码 token 相同。",
    ),
    "draft_vocab_size": (
        "草稿模型的词表大小，与主词表一致（发布的模型）。",
        "markov_w2 与草稿 logits 的行数。比主词表小时，文件里要有 d2t：草稿词表到目标 id 的对照。",
        "比主词表大没有意义；不等而没有 d2t 就是写错。vLLM 只接受与主词表相等。",
    ),
    "tie_word_embeddings": (
        "词嵌入与输出层是否共享。false 表示不共享，所以 lm_head 单独存放在 lm_head.safetensors。",
        "输出层用哪个矩阵；两个权重文件在 false 时缺一不可（除非框架用目标的 lm_head）。",
        "报缺少词表投影层：单独加载 lm_head.safetensors；误写 true 则用词嵌入当输出层，草稿 token 全错。",
    ),
    "markov_rank": (
        "Markov 头的低秩维度。",
        "markov_w1、markov_w2 的宽度：偏置 = W2·W1[前一个 token]，每步读一遍 W2。直接影响接受率与草稿耗时。",
        "形状对不上；W1 与 W2 形状相同，互换不会报错，但每个槽位都变差。",
    ),
    "markov_head_type": (
        "Markov 头的类型：vanilla 是标准版，用一阶马尔可夫近似“下一个 token 依赖上一个 token”，计算代价低，"
        "适合高频搭配；gated 加一个门，rnn 带状态。",
        "文件里有没有 gate_proj 或 joint_proj，草稿循环里每步算什么。",
        "类型与权重不符就缺张量。论文里 rnn 只在很长的块上略好。",
    ),
    "enable_confidence_head": (
        "是否带置信度头：为每个草稿 token 估计被主模型接受的概率。",
        "能否按置信度动态调整投机长度：置信度高多验证几个，低就收敛，整体吞吐更稳。生产环境建议开启。",
        "为 true 而没有 confidence_head 张量就缺张量；vLLM、TokenSpeed、ATOM 的 K3 模块会丢弃它，始终验证整块。",
    ),
    "confidence_head_with_markov": (
        "置信度头是否与 Markov 头联合工作：输入是最终归一化后的隐藏状态，后面接前一个 token 的 W1 行。",
        "confidence_head.proj 的输入宽度：hidden_size + markov_rank，或只有 hidden_size。",
        "拼接顺序或宽度错了，只影响调度好坏，不影响正确性。",
    ),
    "torch_dtype": (
        "权重精度：bfloat16，适合现代 GPU/NPU。新版字段名是 dtype。",
        "张量的存储格式与计算精度；部署前先核对 NPU/GPU 与驱动是否支持 bfloat16。",
        "与文件里的格式不符说明配置被改过；改成 float16 会溢出或损失精度，量化或精度改变时接受率也会变。",
    ),
    "_torchspec_version": (
        "模型由 TorchSpec（PyTorch 的投机解码工具链）转换生成时的版本。",
        "下划线开头的是元信息，不参与推理；排查模型来源时有用。",
        "没有影响，原样保留。",
    ),
    "_converted_from": (
        "转换来源的训练检查点路径。",
        "元信息，不参与推理；记录这份权重从哪个训练检查点来。",
        "没有影响，原样保留。",
    ),
    "hidden_act": (
        "前馈网络的激活函数；缺省为 silu（SwiGLU）。",
        "每层 MLP 的计算。",
        "从目标模型继承 situ 能运行，但与训练不符，接受率下降；本工具只接受 silu。",
    ),
    "block_size": (
        "一块里的草稿 token 数，缺省 7：锚点加 6 个掩码进去，提出 7 个 token。",
        "目标每轮验证 block_size + 1 行（多出的一行给奖励 token）。TokenSpeed 的宽度参数写 8。",
        "超过训练值，后面的槽位没有训练过。",
    ),
    "block_causal": (
        "块内掩码：false 为双向，每个槽位看得到同块所有槽位；true 为因果。也读 dflash_config.causal 与"
        " full_attention_causal。",
        "块内注意力的掩码。五层的 K3 草稿是双向；三层的 Block5 与 K3.1-Pro 预览版是因果。",
        "用错掩码能运行，每轮约少接受一个 token（实测 4.6 降到 3.8）。",
    ),
    "fc_norm": (
        "拼接前每个取用层是否先做一次 RMSNorm（lightseekorg 的草稿如此）。",
        "文件里有没有 fc_norm.0 … fc_norm.4。",
        "有张量而不用或反之，接受率大跌；严格加载会报多或缺张量。",
    ),
    "aux_hidden_stream": (
        "取用层取哪一股：prefix 是 AttnRes 的原始前缀和（Inferact 系），attn_res 是混合后的流"
        "（lightseekorg、RadixArk 系）。",
        "从目标模型哪里抽取隐藏状态。",
        "取错流损失 1–5 个百分点的接受率；漏掉 MLP 那一项则几乎全失。",
    ),
    "sample_from_anchor": (
        "第一个槽位（锚点）是否也提出一个 token；DSpark 为 true，最初的 DFlash 为 false。",
        "γ 个输入给出 γ 个草稿 token，还是 γ + 1 个输入。",
        "按 DFlash 的约定读，第一个 token 丢失，其余全部错位一个。",
    ),
    "share_target_embeddings": (
        "草稿不存自己的词嵌入与 lm_head，加载时用目标的。本工具训练的草稿使用；发布的文件没有。",
        "文件里有没有 embed_tokens。",
        "目标与草稿宽度不同就不能共享；目标被旋转量化（QuaRot）时共享的含义也变了。",
    ),
}
