"""运行手册的中文文本。"""

from __future__ import annotations

from typing import Final

from k3dspark.monitoring.runbook import Entry

LABELS: Final = {
    "title": "DSpark 告警处理手册",
    "intro": "由 `k3dspark monitor export` 生成。除非条目另有说明，这些告警都不影响输出的正确性：草稿变差损失的是时间，不是质量。"
    "`k3dspark diagnose --url http://HOST:PORT` 从同样的指标给出原因。",
    "severity": "级别",
    "wait": "持续",
    "critical": "严重",
    "warning": "警告",
    "info": "提示",
    "first": "先做：",
    "cause": "原因（按可能性排序）",
    "test": "判定方法",
}

_DIAGNOSE: Final = "`k3dspark diagnose --url http://HOST:PORT`"
_INSPECT: Final = "`k3dspark inspect DRAFT --target TARGET`"

ENTRIES: Final = {
    "DSparkNothingAccepted": Entry(
        "草稿照常生成并校验，但一个词元也没有被接受：每轮只得到目标模型自己的一个词元，比不用草稿还慢。",
        f"若延迟要紧，先关闭投机解码，再运行 {_INSPECT} 与 {_DIAGNOSE}。",
        (
            ("权重根本没有加载：LFS 指针、dummy 权重、随机初始化", f"{_INSPECT}，以及引擎的加载日志"),
            ("草稿属于另一个目标模型，或词表不一致", "同一报告中的 Token ID 与词嵌入行比对"),
            ("位置读早了一格（speculators 约定），或选错模型类", "引擎日志中的架构名；引擎版本"),
            ("取用层或取用流接错", "引擎的层下标应为 `target_layer_ids` 加一；MLA 草稿不要设置 VLLM_KIMI_K3_AUX_ATTN_RES_STREAM"),
        ),
    ),
    "DSparkAcceptanceLow": Entry(
        "接受长度远低于该负载平时的水平，而各位置的形状正常：草稿仍然认识目标模型，只是变差了。",
        f"先看流量是否变化（语言、提示长度、温度），再运行 {_DIAGNOSE}。",
        (
            ("流量变了：语言或领域不同、提示更长、温度更高", "对保存的响应按提示长度分组：`k3dspark diagnose --requests FILE`"),
            ("层映射或取用流与训练时不同", "对照 `target_layer_ids` 与引擎日志；两种流形状相同，只有接受率能看出来"),
            ("精度：目标或草稿被量化、KV 缓存为 8 位", "同样的提示用 bf16 再跑"),
            ("草稿的 YaRN 丢失（K3 几何下缩放应为 0.1309，丢失后为 0.0722）", f"`k3dspark explain DRAFT` 的数值；{_INSPECT}"),
            ("前缀缓存命中的部分没有写入草稿缓存", "关闭前缀缓存后同样的提示"),
        ),
    ),
    "DSparkBelowBreakEven": Entry(
        "有词元被接受，但一轮花的时间超过它所替代的普通步：在当前负载下，不用草稿反而更快。",
        "核对一轮的时间与 `monitor export` 时给定的普通步时间：该数值在当前负载下还成立吗？",
        (
            ("对当前负载来说草稿词元太多：大批量时校验不是免费的", "减少草稿词元，或按批量设置（`num_speculative_tokens_per_batch_size`）"),
            ("起草或校验没有进图", "引擎日志：eager 模式、图尺寸没有覆盖 batch × (K + 1)"),
            ("隐藏状态走了慢链路", "`k3dspark check` 的节点间带宽"),
            ("MoE 在单请求时：更多行唤醒更多专家", "提高并发后再测"),
        ),
    ),
    "DSparkNotDrafting": Entry(
        "有词元生成，却没有任何投机轮次：引擎没有使用草稿。",
        "在引擎启动日志中查找投机配置。",
        (
            ("启动时没有投机配置，或别的节点用了别的命令", "命令行；`k3dspark launch` 会写出它"),
            ("投机被自动关闭：批量超限，或请求用了不支持的选项", "并发为 1 时的接受率"),
            ("不带草稿的服务器被放在同一服务名下采集", "prometheus.yml 中的目标"),
            ("统计被关闭", "/metrics 中是否有 spec_decode 指标"),
        ),
    ),
    "DSparkRanksDiverge": Entry(
        "同一模型的各 rank 承担同样的流量，接受率却不同：其中某个与众不同。",
        "在 `dspark:rank_acceptance_length:5m` 中找出该 rank，与正常节点对比。",
        (
            ("某节点的权重或配置不同", "两个节点上都运行 `k3dspark inspect DRAFT --verify`"),
            ("软件不同：驱动、CANN、引擎", "两边的 `k3dspark check --json` 对比"),
            ("路由策略把不同的流量送到那里", "各 rank 的提示长度与前缀命中率"),
            ("设备故障导致计算错误", "对该 rank 运行 `k3dspark accept`：此时输出也可能是错的"),
        ),
    ),
    "DSparkCollapseAfterFirstSlot": Entry(
        "第一个草稿词元很好，之后全部很差：目标的状态已经到达，块内的计算出了问题。",
        f"{_DIAGNOSE}；问题在块内，不在取用层。",
        (
            ("双向训练的块用了因果掩码，或相反", "草稿的 `block_causal` 与引擎版本"),
            ("Markov 头缺失、转置，或输入的词元不对", "加载日志中的 `markov_head` 张量"),
            ("mask token id 或块内位置错误", f"{_INSPECT}：mask_token_id"),
        ),
    ),
    "DSparkLateSlotCollapse": Entry(
        "某个靠后的位置突然比前一个差很多，而块内接受率通常平滑变化。",
        "在 `dspark:slot_conditional:5m` 中看是哪个位置。",
        (
            ("超出训练块长：该位置从未训练过", "config.json 的 `block_size` 与引擎的草稿词元数"),
            ("自适应校验在此截断，很少有轮次到达该位置", "校验长度；测试时关闭自适应"),
            ("某个算子只处理有限的查询行", "减少一个草稿词元"),
        ),
    ),
    "DSparkFewerSlots": Entry(
        "提议的草稿词元少于训练块长：最后几个几乎不花起草时间的词元被白白放弃。",
        "引擎命令中的数值。",
        (
            ("宽度与提议数混淆：引擎要的是锚点 + 7 = 8，却给了 7", "SGLang 与 TokenSpeed 取校验宽度，vLLM 取提议数"),
            ("为当前负载有意选择", "用 `k3dspark monitor export --block N` 改变预期"),
        ),
    ),
    "DSparkMoreSlots": Entry(
        "提议的草稿词元多于训练块长：多出来的是必须校验的噪声。",
        "引擎命令中的数值。",
        (
            ("宽度与提议数混淆：引擎要 7 个提议，却给了 8", "vLLM 取提议数，SGLang 与 TokenSpeed 取校验宽度"),
            ("换上了块更小的草稿", "其 config.json 的 `block_size`"),
        ),
    ),
    "DSparkSlotsDoNotAddUp": Entry(
        "各位置之和应等于接受长度减一，实际不等：按位置的数字漏掉了某些 rank。总数可信，各位置不可信。",
        "有多少 rank 导出了按位置的计数器。",
        (
            ("引擎只统计了一个数据并行 rank 的位置", "数据并行设为 1；换新版引擎"),
            ("某个 rank 的块长不同", "按实例查看各位置"),
        ),
    ),
    "DSparkScrapeFailing": Entry(
        "该地址没有响应。此间无法了解它的任何情况，其他告警也不会替它发声。",
        "进程还在吗？在 Prometheus 所在机器上执行 `curl http://HOST:PORT/metrics`。",
        (
            ("引擎已退出，或仍在加载", "日志；进程"),
            ("端口、防火墙或地址变更", "先在节点本机 curl，再从这里 curl"),
            ("SGLang 未加 --enable-metrics", "HTTP 404"),
        ),
    ),
    "DSparkFamilyMissing": Entry(
        "引擎能被采集，但没有任何这些规则认识的指标名：规则对它是盲的。",
        "`k3dspark monitor HOST:PORT --once` 会列出缺少什么。",
        (
            ("统计被关闭（--disable-log-stats）", "引擎命令行"),
            ("某个版本改了指标名", "/metrics 中的名字；更新 `k3dspark`"),
            ("它不是引擎：代理或路由", "/metrics 的内容"),
        ),
    ),
    "DSparkEngineRestarted": Entry(
        "计数器回落：进程在最近一刻钟内重新启动，图与缓存都是冷的。",
        "重启之前的最后几行日志。",
        (
            ("设备内存不足，尤其在长上下文时", "日志；`k3dspark plan`"),
            ("设备或驱动故障", "DSparkDeviceFault；dmesg；驱动日志"),
            ("有人重启了它", "服务管理器日志"),
        ),
    ),
    "DSparkIdleWhileQueued": Entry(
        "请求在排队，设备却大多空闲：卡住引擎的不是计算。",
        "同一节点的缓存占用与抢占次数。",
        (
            ("缓存块用完：请求在等内存", "缓存占用接近 100 %；`k3dspark plan`"),
            ("瓶颈在主机：单个 Python 线程占满、没有绑核", "引擎进程的 CPU 占用"),
            ("各 rank 在等最慢的一个或某条链路", "逐设备利用率；`k3dspark check` 的链路项"),
            ("并发上限低于实际可容纳的数量", "--max-num-seqs 与运行中的请求数"),
        ),
    ),
    "DSparkDeviceFault": Entry(
        "设备报告自身不健康，其计算结果不可信：这条告警同时关乎正确性。",
        "把该节点撤出服务。",
        (
            ("硬件或驱动故障", "`npu-smi info -t health`、`nvidia-smi -q`、dmesg"),
            ("过热", "设备温度"),
        ),
    ),
}  # fmt: skip
