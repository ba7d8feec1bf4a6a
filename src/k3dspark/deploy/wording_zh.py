"""检查清单的中文文本：每行的标题，以及各条消息的（证据，处理办法）。"""

from __future__ import annotations

from typing import Final

SECTIONS: Final = {
    "draft": "草稿模型",
    "target": "目标模型",
    "device": "设备",
    "software": "推理引擎与框架",
    "host": "本节点",
    "nodes": "集群",
    "links": "互联",
    "ops": "算子",
}
STATUSES: Final = {"pass": "通过", "warn": "警告", "fail": "失败", "na": "不适用"}
COLUMNS: Final = ("", "检查项", "证据")
LABELS: Final = {
    "title": "k3dspark check 检查清单",
    "remedy": "处理",
    "remedies": "处理办法",
    "summary": "通过 {pass} 项，警告 {warn} 项，失败 {fail} 项，不适用 {na} 项",
    "ok": "可以部署",
    "bad": "尚不能部署",
}

TITLES: Final = {
    "draft.files": "文件完整",
    "draft.config": "config.json 自洽",
    "draft.tensors": "张量与配置一致",
    "draft.source": "与下载记录一致",
    "target.complete": "已就位且完整",
    "target.geometry": "尺寸与草稿匹配",
    "target.token_ids": "Token ID 对齐",
    "target.yarn": "YaRN 一致",
    "target.embeddings": "词嵌入与输出层",
    "device.present": "型号",
    "device.health": "健康状态",
    "device.driver": "驱动",
    "device.firmware": "固件",
    "device.cann": "CANN",
    "device.bf16": "bfloat16",
    "device.memory": "显存/内存",
    "software.python": "Python",
    "software.engine": "认识 K3DSparkModel",
    "software.framework": "框架",
    "host.disk": "磁盘",
    "host.shared_memory": "共享内存",
    "host.ports": "端口",
    "host.name": "主机名",
    "nodes.reachable": "可达",
    "nodes.names": "主机名解析",
    "nodes.clock": "时钟",
    "nodes.alike": "各节点一致",
    "links.load": "需要传输的数据",
    "links.measured": "带宽",
    "links.hccs": "HCCS 计数",
    "ops.operator": "算子",
}

_FETCH: Final = "重新下载缺失的文件，或在目标模型的克隆目录里执行 `git lfs pull`"
_VISIBLE: Final = "检查驱动是否已加载（`lsmod | grep drv`）、/dev/davinci* 是否存在、容器启动时是否映射了这些设备"
_FIRMWARE: Final = "安装与驱动配套的固件并重启"

MESSAGES: Final[dict[str, tuple[str, str]]] = {
    "finding": ("{what}：{why} [{id}]", "{remedy}"),
    "draft.files": ("{count} 个权重文件，共 {bytes:,} 字节，没有截断，也不是 LFS 指针", ""),
    "draft.config": ("{count} 条规则成立；已知名称：{known}", ""),
    "draft.tensors": ("{tensors} 个张量，{parameters:,} 个参数，{bytes:,} 字节", ""),
    "draft.tensors.unknown": ("文件或配置有问题，无法判断", ""),
    "draft.source": ("大小与 `k3dspark fetch` 的记录相同", ""),
    "draft.source.none": ("不是用 `k3dspark fetch` 下载的，没有记录可比", ""),
    "target.none": (
        "没有给出 --target：完整性、Token ID、YaRN 和词嵌入都没有比对",
        "用 --target 指明目标模型目录；没有主模型，草稿模型无法工作",
    ),
    "target.uncompared": ("没有可比对的内容", ""),
    "target.complete": ("{layers} 层中的 {found} 层，{shards} 个文件，共 {bytes:,} 字节", ""),
    "target.shard": ("{file}：{detail}", _FETCH),
    "target.more": ("另有 {count} 个文件有问题", _FETCH),
    "target.layers": ("权重里只有 {layers} 层中的 {found} 层，缺：{missing}", _FETCH),
    "target.unstated": ("config.json 没有写 num_hidden_layers", "从来源重新取 config.json"),
    "target.geometry": (
        "hidden_size {hidden_size}，{num_hidden_layers} 层，vocab_size {vocab_size}；取用层 {taps} 均存在",
        "",
    ),
    "target.token_ids": ("mask {mask}、bos {bos}、eos {eos}、pad {pad} 与目标模型的 tokenizer 一致", ""),
    "target.token_ids.no_tokenizer": (
        "目标模型没有 tokenizer 文件；mask {mask}、bos {bos}、eos {eos}、pad {pad} 只与其 config.json 比对",
        "把 tokenizer_config.json 放到目标模型权重旁边",
    ),
    "target.yarn": (
        "两边的 factor {factor}、original_max_position_embeddings {original_max_position_embeddings}、"
        "rope_theta {rope_theta} 相同",
        "",
    ),
    "target.yarn.none": ("草稿的 rope 为 {mine}，目标的为 {theirs}：没有两组 YaRN 可比", ""),
    "target.embeddings": ("双方都存放的矩阵，抽查的行逐位一致（目标：{matrices}）", ""),
    "target.embeddings.none": ("目标模型没有以这些名称存放 embed_tokens 或 lm_head", ""),
    "device.present": ("{count} × {names}（系列 {family}；产品 {product}）", ""),
    "device.present.cut": (
        "{count} × {names}（系列 {family}），但工具输出的表格被截断（{how}）",
        "手动执行 `npu-smi info`；若同样卡住，需要重启驱动",
    ),
    "device.cpu": ("{name}，{cores} 核", ""),
    "device.none": ("没有可查询的设备", ""),
    "device.npu_only": ("只对 NPU 检查", ""),
    "device.tool.missing": (
        "{tool} 没有安装，或不在 PATH 中",
        "安装驱动，或把工具目录加入 PATH（NPU 为 /usr/local/sbin）；容器中需要挂载",
    ),
    "device.tool.failed": ("{tool} 失败，状态 {status}：{said}", _VISIBLE),
    "device.tool.hung": (
        "{tool} 在 {seconds} 秒内没有应答",
        "工具卡住说明驱动在等待失效的设备：查看 dmesg，然后重启节点",
    ),
    "device.tool.empty": ("{tool} 没有列出设备：{said}", _VISIBLE),
    "device.health": ("{count} 个芯片全部健康", ""),
    "device.sick": (
        "NPU {npu} 芯片 {chip} 状态为 {health}",
        "用 `npu-smi info -t health -i {npu}` 查看错误码，并停用该芯片",
    ),
    "device.driver": ("{version}（{path}）", ""),
    "device.driver.unknown": ("没有版本文件，npu-smi 也没有应答", "安装驱动，或用 --root 指明根目录"),
    "device.driver.differs": (
        "{path} 为 {version}，npu-smi 为 {tool}",
        "升级驱动后需要重启；容器中请挂载宿主机的驱动目录",
    ),
    "device.firmware": ("{version}（{path}）", ""),
    "device.firmware.unknown": (
        "版本文件和 npu-smi 都没有给出",
        "以 root 执行 `npu-smi info -t board -i 0`，或查看宿主机的 firmware/version.info",
    ),
    "device.firmware.incompatible": ("npu-smi 报告驱动与固件 {version} 的兼容性为：{said}", _FIRMWARE),
    "device.firmware.outside": ("{version} 不在驱动 {driver} 接受的范围内：{accepted}", _FIRMWARE),
    "device.cann": ("{version}，符合 vLLM-Ascend {engine} 的要求（{wanted}；{path}）", ""),
    "device.cann.alone": ("{version}（{path}）", ""),
    "device.cann.unknown": (
        "没有找到 CANN toolkit（引擎要求 {wanted}）",
        "在推理容器内执行检查，或设置 ASCEND_HOME_PATH",
    ),
    "device.cann.old": (
        "{version}（{path}）低于 vLLM-Ascend {engine} 的要求：{wanted}",
        "安装 CANN {wanted}，或使用该 vLLM-Ascend 版本的镜像",
    ),
    "device.cann.new": (
        "{version}（{path}）高于 vLLM-Ascend {engine} 构建所用的 {wanted}",
        "建议使用 CANN {wanted}，否则自定义算子可能无法加载",
    ),
    "device.bf16": ("{name}（{family}）支持 bfloat16 计算", ""),
    "device.bf16.none": (
        "{name}（{family}）没有 bfloat16 单元，而草稿模型及其引擎都以 bfloat16 计算",
        "使用 Atlas A2、A3 或 950 系列 NPU，或计算能力 8.0 以上的 GPU",
    ),
    "device.bf16.unknown": (
        "从名称 {name} 看不出芯片是否支持 bfloat16",
        "在该机器上执行 `k3dspark check --ops`，它会实际计算 bfloat16 矩阵并比对",
    ),
    "device.bf16.slow": ("{name} 只能模拟 bfloat16", "测试无妨；`k3dspark generate` 会自动改用 float32"),
    "device.bf16.unneeded": ("该草稿为 {dtype}，{name} 无需 bfloat16", ""),
    "device.memory": (
        "{name}：{total} GB 中可用 {free} GB；需要 {short} GB（草稿 {weights} + 目标分摊 {share} + 运行开销 {overhead} "
        "+ {per_token} 字节 × {brief} token），{context} token 时需要 {full} GB",
        "",
    ),
    "device.memory.small": (
        "{name} 只有 {total} GB；需要 {short} GB（草稿 {weights} + 目标分摊 {share} + 运行开销 {overhead} + "
        "{per_token} 字节 × {brief} token）",
        "使用显存更大的设备，或把目标模型分到更多设备上",
    ),
    "device.memory.taken": (
        "{name}：{total} GB 中只有 {free} GB 可用；需要 {short} GB（草稿 {weights} + 目标分摊 {share} + "
        "运行开销 {overhead} + {per_token} 字节 × {brief} token）。占用者：{holders}",
        "结束占用显存的进程，或换用其他设备",
    ),
    "device.memory.short": (
        "{name}：{total} GB 中可用 {free} GB；够 {brief} token（{short} GB），不够 {context} token（{full} GB）",
        "调低引擎的 max_model_len，或为长上下文预留每卡 32 GB",
    ),
    "device.memory.unknown": ("无法得知该设备的内存", ""),
    "device.memory.config": ("config.json 有误，无法计算", ""),
    "software.python": ("{version}（{program}）", ""),
    "software.python.silent": ("{program} 没有应答：{problem}", "检查 --python"),
    "software.unread": ("Python 没有应答", ""),
    "software.engine": ("{engine} {version}；自 {since} 起支持", ""),
    "software.engine.newer": ("{engine} {version}；自 {since} 起支持；比最后核对过的 {newest} 更新", ""),
    "software.engine.old": (
        "{engine} {version} 过旧：{since} 起才有 K3DSparkModel",
        "把 {engine} 升级到 {since} 或更新",
    ),
    "software.engine.never": (
        "{engine} 至今没有任何版本支持该草稿（已安装 {version}）：{why}",
        "改用 {wanted} 部署",
    ),
    "software.engine.none": (
        "这个 Python 中没有安装 {names}",
        "在推理容器内执行检查，用 --python 指明其 Python，或安装 {wanted} 及以上版本",
    ),
    "software.engine.own": ("没有安装引擎；在 CPU 上由 `k3dspark generate` 直接运行", ""),
    "software.base.none": ("安装了 vLLM-Ascend {plugin}，却没有 vLLM", "安装相同版本号的 vLLM"),
    "software.base.other": (
        "vLLM {base} 与 vLLM-Ascend {plugin} 的版本号必须相同",
        "安装该 vLLM-Ascend 版本指定的 vLLM",
    ),
    "software.framework": ("{listed}", ""),
    "software.torch.none": ("这个 Python 中没有 torch", "在推理容器内执行检查，或使用 --python"),
    "software.torch_npu.none": ("torch {torch} 没有配 torch-npu，无法使用 NPU", "安装相同版本号的 torch-npu"),
    "software.torch_npu.other": (
        "torch {torch} 与 torch-npu {npu} 的版本号必须相同",
        "安装为该 torch 构建的 torch-npu",
    ),
    "host.disk": ("{place} 可用 {free} GB", "为算子缓存、编译图和日志留出 10 GB"),
    "host.disk.full": ("{place} 可用 {free} GB", "为算子缓存、编译图和日志留出 10 GB"),
    "host.shared": ("/dev/shm 可用 {free} MB", ""),
    "host.shared.small": (
        "/dev/shm 只有 {free} MB 可用，而引擎的进程经它传递数据",
        "启动容器时加 --shm-size=16g 或 --ipc=host",
    ),
    "host.shared.none": ("这里没有 /dev/shm", ""),
    "host.port": ("{port} 空闲", ""),
    "host.port.taken": (
        "{port} 已被其他程序占用",
        "用 `ss -ltnp sport = :{port}` 查找，或用 --ports 换一个端口",
    ),
    "host.port.forbidden": ("{port} 无法打开：{reason}", "使用 1024 以上的端口"),
    "host.name": ("{name} = {addresses}", ""),
    "host.name.unresolved": ("{name} 无法解析", "写入 /etc/hosts：torch.distributed 和 HCCL 会解析本机名"),
    "host.name.loopback": (
        "{name} 只解析到 {addresses}，其他节点会因此连到它们自己",
        "在 /etc/hosts 中为 {name} 写上网络地址，或设置 GLOO_SOCKET_IFNAME 与 HCCL_SOCKET_IFNAME",
    ),
    "nodes.none": ("单节点（没有 --nodes）", ""),
    "nodes.unasked": ("没有节点应答", ""),
    "nodes.no_npus": ("没有节点报告驱动或芯片", ""),
    "nodes.reachable": ("应答，自称 {host}", ""),
    "nodes.silent": ("{node} 的 ssh 没有应答：{problem}", "让 `ssh -o BatchMode=yes {node} true` 无需密码即可执行"),
    "nodes.names": ("{count} 个名称在各节点都能解析，且一致", ""),
    "nodes.unresolved": ("{node} 在本机无法解析", "在每个节点的 /etc/hosts 中加入它"),
    "nodes.loopback": ("{node} 只解析到 {addresses}，即每台机器自己", "在 /etc/hosts 中为 {node} 写上网络地址"),
    "nodes.same_name": ("不止一个节点自称 {host}", "给每个节点各自的名称"),
    "nodes.blind": ("{node} 无法解析 {other}", "在该节点的 /etc/hosts 中加入 {other}"),
    "nodes.other_address": (
        "{node} 把 {other} 解析为 {address}，本机解析为 {known}",
        "让所有节点的 /etc/hosts 一致",
    ),
    "nodes.clock": ("与本机相差 {offset} 秒（± {uncertainty}）", ""),
    "nodes.skew": (
        "与本机相差 {offset} 秒（± {uncertainty}）",
        "在该节点启动 chrony 或 ntpd：超时、日志和证书都以时钟为准",
    ),
    "nodes.alike": ("{listed}", ""),
    "nodes.driver": ("驱动不同：{listed}", "在每个节点安装相同的驱动"),
    "nodes.chips": ("设备不同：{listed}", "使用设备相同的节点"),
    "nodes.port": ("{node} 上的 {port} 已被占用", "在该节点用 `ss -ltnp sport = :{port}` 查找"),
    "links.load": (
        "每个被验证 token 的隐藏状态 {hidden} 字节；{requests} 个请求 → 每轮 {rows} 行，{round} MB，至多 {rounds} 轮/秒"
        "（一步 {step} 毫秒）= {rate} GB/s；{needed} GB/s 可使其低于一步的 {share}",
        "",
    ),
    "links.measured": (
        "{bandwidth} GB/s，{latency} 微秒（{backend}）：每轮 {transfer} 毫秒，为一步的 {of_step}；加速比上限 {bound}"
        "（没有传输时为 {most}）",
        "",
    ),
    "links.slow": (
        "{bandwidth} GB/s，{latency} 微秒（{backend}）：每轮 {transfer} 毫秒，为一步的 {of_step}；加速比上限 {bound}"
        "（没有传输时为 {most}）；低于 {share} 需要 {needed} GB/s 且几乎没有延迟",
        "把草稿放在持有取用层的设备上，或改用更快的网卡（HCCL_SOCKET_IFNAME、NCCL_SOCKET_IFNAME、GLOO_SOCKET_IFNAME）",
    ),
    "links.unmeasured": ("没有测量（--links 测量进程之间的带宽，配合 --nodes 测量节点之间的带宽）", ""),
    "links.hccs": ("当前发送 {sent} GB/s，接收 {received} GB/s；错误 {errors}，重传 {retries}", ""),
    "links.hccs.sick": (
        "当前发送 {sent} GB/s，接收 {received} GB/s；错误 {errors}，重传 {retries}",
        "对该芯片执行 `npu-smi info -t hccs`；若错误继续增加，重插或更换模组",
    ),
    "links.hccs.none": ("该产品没有 HCCS 计数", ""),
    "ops.right": ("{shape}：误差 {error}（允许 {tolerance}），{ms} 毫秒，{how}", ""),
    "ops.wrong": (
        "{shape}：与 CPU 上的 fp32 相比误差 {error}，超过 {tolerance}（{how}）",
        "在驱动、CANN 和 torch 版本配套之前，不要在该设备上部署",
    ),
    "ops.local": (
        "{shape}：误差 {error}（允许 {tolerance}），{ms} 毫秒；已降级为本地实现：{problem}",
        "可以工作，但会慢一些；升级该设备的 PyTorch 插件即可获得此算子",
    ),
    "ops.failed": ("{shape}：无法运行：{problem}", "升级驱动、CANN 和该设备的 PyTorch 插件"),
}
