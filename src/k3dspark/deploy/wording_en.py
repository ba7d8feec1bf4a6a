"""The checklist in English: titles of lines, and (evidence, remedy) of messages."""

from __future__ import annotations

from typing import Final

SECTIONS: Final = {
    "draft": "Draft model",
    "target": "Target model",
    "device": "Device",
    "software": "Engine and frameworks",
    "host": "This node",
    "nodes": "Cluster",
    "links": "Links",
    "ops": "Operators",
}
STATUSES: Final = {"pass": "pass", "warn": "warn", "fail": "fail", "na": "n/a"}
COLUMNS: Final = ("", "check", "evidence")
LABELS: Final = {
    "title": "k3dspark check",
    "remedy": "do",
    "remedies": "What to do",
    "summary": "{pass} passed, {warn} warnings, {fail} failed, {na} not applicable",
    "ok": "ready",
    "bad": "not ready",
}

TITLES: Final = {
    "draft.files": "files are whole",
    "draft.config": "config.json holds together",
    "draft.tensors": "tensors match the config",
    "draft.source": "as fetched",
    "target.complete": "present and complete",
    "target.geometry": "the draft's target by size",
    "target.token_ids": "token ids",
    "target.yarn": "YaRN equality",
    "target.embeddings": "embedding and head",
    "device.present": "model",
    "device.health": "health",
    "device.driver": "driver",
    "device.firmware": "firmware",
    "device.cann": "CANN",
    "device.bf16": "bfloat16",
    "device.memory": "memory",
    "software.python": "Python",
    "software.engine": "knows K3DSparkModel",
    "software.framework": "frameworks",
    "host.disk": "disk",
    "host.shared_memory": "shared memory",
    "host.ports": "port",
    "host.name": "host name",
    "nodes.reachable": "reachable",
    "nodes.names": "host names",
    "nodes.clock": "clock",
    "nodes.alike": "alike",
    "links.load": "what must travel",
    "links.measured": "bandwidth",
    "links.hccs": "HCCS counters",
    "ops.operator": "operator",
}

_FETCH: Final = "fetch the missing files again, or run `git lfs pull` in the target's clone"
_VISIBLE: Final = (
    "check that the driver is loaded (`lsmod | grep drv`), that /dev/davinci* exist, and that the container was "
    "started with these devices"
)

MESSAGES: Final[dict[str, tuple[str, str]]] = {
    "finding": ("{what}: {why} [{id}]", "{remedy}"),
    "draft.files": ("{count} weight files, {bytes:,} bytes, none truncated, no LFS pointer", ""),
    "draft.config": ("{count} rules hold; known as: {known}", ""),
    "draft.tensors": ("{tensors} tensors, {parameters:,} parameters, {bytes:,} bytes", ""),
    "draft.tensors.unknown": ("not to be judged while files or config are broken", ""),
    "draft.source": ("sizes are those that `k3dspark fetch` recorded", ""),
    "draft.source.none": ("not fetched by `k3dspark fetch`: nothing was recorded to compare with", ""),
    "target.none": (
        "no --target was given: completeness, token ids, YaRN and embeddings were not compared",
        "name the target's directory with --target; a draft is of no use without it",
    ),
    "target.uncompared": ("nothing to compare", ""),
    "target.complete": ("{found} of {layers} layers in {shards} files, {bytes:,} bytes", ""),
    "target.shard": ("{file}: {detail}", _FETCH),
    "target.more": ("{count} more files are wrong", _FETCH),
    "target.layers": ("{found} of {layers} layers are in the weights; missing: {missing}", _FETCH),
    "target.unstated": ("config.json does not say num_hidden_layers", "take config.json again from its source"),
    "target.geometry": (
        "hidden_size {hidden_size}, {num_hidden_layers} layers, vocab_size {vocab_size}; taps {taps} exist",
        "",
    ),
    "target.token_ids": ("mask {mask}, bos {bos}, eos {eos}, pad {pad} agree with the target's tokenizer", ""),
    "target.token_ids.no_tokenizer": (
        "the target has no tokenizer files; mask {mask}, bos {bos}, eos {eos}, pad {pad} were compared with its "
        "config.json only",
        "put tokenizer_config.json beside the target's weights",
    ),
    "target.yarn": (
        "factor {factor}, original_max_position_embeddings {original_max_position_embeddings}, "
        "rope_theta {rope_theta} on both sides",
        "",
    ),
    "target.yarn.none": ("rope is {mine} in the draft and {theirs} in the target: no two YaRN blocks to compare", ""),
    "target.embeddings": ("sampled rows agree bit by bit, of what both store (target: {matrices})", ""),
    "target.embeddings.none": ("the target stores neither embed_tokens nor lm_head under these names", ""),
    "device.present": ("{count} × {names} (family {family}; product {product})", ""),
    "device.present.cut": (
        "{count} × {names} (family {family}), but the tool's table is cut off ({how})",
        "run `npu-smi info` by hand; if it stalls too, the driver needs a restart",
    ),
    "device.cpu": ("{name}, {cores} cores", ""),
    "device.none": ("no device to ask", ""),
    "device.npu_only": ("asked of NPUs only", ""),
    "device.tool.missing": (
        "{tool} is not installed, or not on PATH",
        "install the driver, or add its tools to PATH (NPU: /usr/local/sbin); in a container mount them",
    ),
    "device.tool.failed": ("{tool} failed with status {status}: {said}", _VISIBLE),
    "device.tool.hung": (
        "{tool} did not answer within {seconds} s",
        "a hanging tool means a driver that waits for a dead device: read dmesg, then restart the node",
    ),
    "device.tool.empty": ("{tool} lists no device: {said}", _VISIBLE),
    "device.health": ("all {count} chips are healthy", ""),
    "device.sick": (
        "NPU {npu} chip {chip} reports {health}",
        "run `npu-smi info -t health -i {npu}` for the error codes; take the chip out of service",
    ),
    "device.driver": ("{version} ({path})", ""),
    "device.driver.unknown": ("no version file and no answer from npu-smi", "install the driver, or pass --root"),
    "device.driver.differs": (
        "{path} says {version}, npu-smi says {tool}",
        "restart after a driver update; in a container mount the host's driver directory",
    ),
    "device.firmware": ("{version} ({path})", ""),
    "device.firmware.unknown": (
        "neither a version file nor npu-smi states it",
        "run `npu-smi info -t board -i 0` as root, or read firmware/version.info on the host",
    ),
    "device.firmware.incompatible": (
        "npu-smi says of driver and firmware {version}: {said}",
        "install the firmware that belongs to the driver and restart",
    ),
    "device.firmware.outside": (
        "{version} lies outside what driver {driver} accepts: {accepted}",
        "install the firmware that belongs to the driver and restart",
    ),
    "device.cann": ("{version}, as vLLM-Ascend {engine} wants ({wanted}; {path})", ""),
    "device.cann.alone": ("{version} ({path})", ""),
    "device.cann.unknown": (
        "no CANN toolkit found (the engine wants {wanted})",
        "run the check inside the serving container, or set ASCEND_HOME_PATH",
    ),
    "device.cann.old": (
        "{version} ({path}) is older than vLLM-Ascend {engine} wants: {wanted}",
        "install CANN {wanted}, or the image of that vLLM-Ascend release",
    ),
    "device.cann.new": (
        "{version} ({path}) is newer than vLLM-Ascend {engine} was built with: {wanted}",
        "prefer CANN {wanted}; custom operators may not load otherwise",
    ),
    "device.bf16": ("{name} ({family}) computes in bfloat16", ""),
    "device.bf16.none": (
        "{name} ({family}) has no bfloat16 units, and the draft and its engines compute in bfloat16",
        "use Atlas A2, A3 or 950 NPUs, or a GPU of compute capability 8.0 or higher",
    ),
    "device.bf16.unknown": (
        "the name {name} does not tell whether the chip computes in bfloat16",
        "run `k3dspark check --ops` here: it multiplies bfloat16 matrices and compares",
    ),
    "device.bf16.slow": (
        "{name} only emulates bfloat16",
        "nothing for tests; `k3dspark generate` takes float32 here by itself",
    ),
    "device.bf16.unneeded": ("this draft is {dtype}; {name} needs no bfloat16 for it", ""),
    "device.memory": (
        "{name}: {free} of {total} GB free; needed {short} GB ({weights} draft + {share} target share + {overhead} "
        "runtime + {per_token} B × {brief} tokens), {full} GB at {context} tokens",
        "",
    ),
    "device.memory.small": (
        "{name} has {total} GB; needed {short} GB ({weights} draft + {share} target share + {overhead} runtime + "
        "{per_token} B × {brief} tokens)",
        "use devices with more memory, or spread the target over more devices",
    ),
    "device.memory.taken": (
        "{name}: only {free} of {total} GB free; needed {short} GB ({weights} draft + {share} target share + "
        "{overhead} runtime + {per_token} B × {brief} tokens). Held by: {holders}",
        "end what holds the memory, or choose other devices",
    ),
    "device.memory.short": (
        "{name}: {free} of {total} GB free; enough for {brief} tokens ({short} GB), not for {context} ({full} GB)",
        "lower the engine's max_model_len, or reserve 32 GB a device for long contexts",
    ),
    "device.memory.unknown": ("the memory of this device is not known", ""),
    "device.memory.config": ("cannot be computed while config.json is wrong", ""),
    "software.python": ("{version} ({program})", ""),
    "software.python.silent": ("{program} does not answer: {problem}", "check --python"),
    "software.unread": ("Python did not answer", ""),
    "software.engine": ("{engine} {version}; known there since {since}", ""),
    "software.engine.newer": ("{engine} {version}; known since {since}; newer than {newest}, the last one checked", ""),
    "software.engine.old": (
        "{engine} {version} is too old: K3DSparkModel came with {since}",
        "upgrade {engine} to {since} or newer",
    ),
    "software.engine.never": (
        "no release of {engine} up to now serves this draft ({version} is installed): {why}",
        "serve it with {wanted}",
    ),
    "software.engine.none": (
        "none of {names} is installed in this Python",
        "run the check inside the serving container, name its Python with --python, or install {wanted} or newer",
    ),
    "software.engine.own": ("no engine installed; on a CPU `k3dspark generate` runs the pair itself", ""),
    "software.base.none": ("vLLM-Ascend {plugin} is installed without vLLM", "install the vLLM of the same number"),
    "software.base.other": (
        "vLLM {base} beside vLLM-Ascend {plugin}: they must have the same number",
        "install the vLLM that this vLLM-Ascend release names",
    ),
    "software.framework": ("{listed}", ""),
    "software.torch.none": ("no torch in this Python", "run the check inside the serving container, or use --python"),
    "software.torch_npu.none": (
        "torch {torch} without torch-npu: it cannot use an NPU",
        "install the torch-npu of the same number",
    ),
    "software.torch_npu.other": (
        "torch {torch} with torch-npu {npu}: they must have the same number",
        "install the torch-npu built for this torch",
    ),
    "host.disk": ("{free} GB free at {place}", "free 10 GB for operator caches, compiled graphs and logs"),
    "host.disk.full": ("{free} GB free at {place}", "free 10 GB for operator caches, compiled graphs and logs"),
    "host.shared": ("{free} MB of /dev/shm free", ""),
    "host.shared.small": (
        "only {free} MB of /dev/shm free, through which an engine's processes pass their batches",
        "start the container with --shm-size=16g or --ipc=host",
    ),
    "host.shared.none": ("there is no /dev/shm here", ""),
    "host.port": ("{port} is free", ""),
    "host.port.taken": (
        "{port} is taken by another program",
        "find it with `ss -ltnp sport = :{port}`, or choose another port with --ports",
    ),
    "host.port.forbidden": ("{port} cannot be opened: {reason}", "choose a port above 1024"),
    "host.name": ("{name} = {addresses}", ""),
    "host.name.unresolved": (
        "{name} does not resolve",
        "add it to /etc/hosts: torch.distributed and HCCL look the own name up",
    ),
    "host.name.loopback": (
        "{name} resolves to {addresses} only; other nodes would be told to connect to themselves",
        "give {name} its network address in /etc/hosts, or set GLOO_SOCKET_IFNAME and HCCL_SOCKET_IFNAME",
    ),
    "nodes.none": ("one node (no --nodes)", ""),
    "nodes.unasked": ("no node answered", ""),
    "nodes.no_npus": ("no node reports a driver or chips", ""),
    "nodes.reachable": ("answers as {host}", ""),
    "nodes.silent": (
        "{node} does not answer over ssh: {problem}",
        "make `ssh -o BatchMode=yes {node} true` work without a password",
    ),
    "nodes.names": ("all {count} names resolve, alike on every node", ""),
    "nodes.unresolved": ("{node} does not resolve here", "add it to /etc/hosts on every node"),
    "nodes.loopback": (
        "{node} resolves to {addresses} only, which is every machine's own",
        "give {node} its network address in /etc/hosts",
    ),
    "nodes.same_name": ("more than one node calls itself {host}", "give each node a name of its own"),
    "nodes.blind": ("{node} cannot resolve {other}", "add {other} to /etc/hosts there"),
    "nodes.other_address": (
        "{node} resolves {other} to {address}, this node to {known}",
        "make /etc/hosts the same on all nodes",
    ),
    "nodes.clock": ("{offset} s from ours (± {uncertainty})", ""),
    "nodes.skew": (
        "{offset} s from ours (± {uncertainty})",
        "start chrony or ntpd there: timeouts, logs and certificates go by the clock",
    ),
    "nodes.alike": ("{listed}", ""),
    "nodes.driver": ("drivers differ: {listed}", "install the same driver on every node"),
    "nodes.chips": ("devices differ: {listed}", "use nodes with the same devices"),
    "nodes.port": ("{port} is taken on {node}", "find it there with `ss -ltnp sport = :{port}`"),
    "links.load": (
        "{hidden} B of hidden states a verified token; {requests} requests → {rows} rows a round, {round} MB, up to "
        "{rounds} rounds/s (step {step} ms) = {rate} GB/s; {needed} GB/s keep it under {share} of a step",
        "",
    ),
    "links.measured": (
        "{bandwidth} GB/s, {latency} µs ({backend}): {transfer} ms a round, {of_step} of a step; speed-up at most "
        "{bound} (of {most} without a link)",
        "",
    ),
    "links.slow": (
        "{bandwidth} GB/s, {latency} µs ({backend}): {transfer} ms a round, {of_step} of a step; speed-up at most "
        "{bound} (of {most} without a link); below {share} takes {needed} GB/s and next to no latency",
        "place the draft on the devices that hold the tapped layers, or use a faster interface "
        "(HCCL_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)",
    ),
    "links.unmeasured": ("not measured (--links measures between processes and, with --nodes, between nodes)", ""),
    "links.hccs": ("sent {sent} GB/s, received {received} GB/s now; {errors} errors, {retries} retries", ""),
    "links.hccs.sick": (
        "sent {sent} GB/s, received {received} GB/s now; {errors} errors, {retries} retries",
        "run `npu-smi info -t hccs` on this chip; reseat or replace the module if errors grow",
    ),
    "links.hccs.none": ("this product gives no HCCS counters", ""),
    "ops.right": ("{shape}: error {error} (allowed {tolerance}), {ms} ms, {how}", ""),
    "ops.wrong": (
        "{shape}: error {error}, more than {tolerance} against fp32 on the CPU ({how})",
        "do not serve on this device before driver, CANN and torch versions are right",
    ),
    "ops.local": (
        "{shape}: error {error} (allowed {tolerance}), {ms} ms; the local implementation stands in: {problem}",
        "works, at some cost in time; update the device's PyTorch plugin to get the operator",
    ),
    "ops.failed": ("{shape}: does not run here: {problem}", "update driver, CANN and the device's PyTorch plugin"),
}
