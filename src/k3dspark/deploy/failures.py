"""Failures that engines are known to die of, recognised in their logs: what the line means and what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Failure:
    """One known failure. `pattern` matches a line of a log; `fatal` ones end the start sooner or later."""

    id: str
    pattern: re.Pattern[str]
    means: str
    remedy: str
    fatal: bool = True


def _failure(name: str, pattern: str, means: str, remedy: str, fatal: bool = True) -> Failure:
    return Failure(name, re.compile(pattern, re.IGNORECASE), means, remedy, fatal)


# The first match wins: what names a cause stands before what only names a symptom.
FAILURES: Final = (
    _failure(
        "architecture_unknown",
        r"K3DSparkModel.{0,120}(not supported|unknown|not recognized|no module|cannot find)"
        r"|(unsupported|unknown|unrecognized).{0,60}(architecture|model type).{0,80}(K3DSpark|k3_dspark)"
        r"|model type .?k3_dspark.? but Transformers does not recognize"
        r"|Model architectures \[.*\] are not supported",
        "the engine does not know the draft's architecture: it is too old",
        "use vLLM 0.27.1, vLLM-Ascend 0.26.0rc1 or newer; k3dspark check names what is installed",
    ),
    _failure(
        "method_unknown",
        r"(dspark|DSPARK).{0,80}(not a valid|invalid choice|unsupported|Input should be|not supported)"
        r"|(Unsupported|invalid).{0,40}speculative (method|algorithm)",
        "the engine does not know the method dspark, or not on this device",
        "use a newer release, or another device; k3dspark plan --engine-version says which has it",
    ),
    _failure(
        "wrong_draft_class",
        r"DSparkDraftModel.{0,200}(KeyError|missing|unexpected|no attribute)"
        r"|NoneType.{0,60}has no attribute .weight.",
        "the draft was loaded as another family's (DeepSeek-V4), because its architecture was not recognised",
        'keep "method": "dspark" and architectures ["K3DSparkModel"] in the draft\'s config.json; update the engine',
    ),
    _failure(
        "architectures_missing",
        r"hf_config\.architectures\[0\]",
        "the draft's config.json has no architectures, which this engine reads",
        'add "architectures": ["K3DSparkModel"] to the draft\'s config.json',
    ),
    _failure(
        "lfs_pointer",
        r"HeaderTooLarge|is a Git LFS pointer|version https://git-lfs",
        "a weight file is a Git LFS pointer of some 130 bytes, not weights",
        "run git lfs pull in the model's directory, or k3dspark fetch; k3dspark inspect names the file",
    ),
    _failure(
        "weights_damaged",
        r"InvalidHeader|MetadataIncompleteBuffer|IncompleteMetadata|InvalidHeaderDeserialization|SafetensorError",
        "a weight file is damaged or cut off",
        "compare sizes with k3dspark inspect, and fetch the file again",
    ),
    _failure(
        "file_missing",
        r"k3dspark: .* is missing|(FileNotFoundError|No such file or directory).{0,200}(safetensors|config\.json)",
        "a file of the target or the draft is not where the plan says",
        "check both paths on this node; they must be the same on every node",
    ),
    _failure(
        "remote_code",
        r"trust_remote_code=True|requires you to execute the configuration file",
        "the checkpoint brings Python of its own, which is not run unasked",
        "plan again with --trust-remote-code if you trust the checkpoint",
    ),
    _failure(
        "cache_too_small",
        r"KV cache is needed.{0,120}larger than the available"
        r"|To serve at least one request.{0,200}KV cache"
        r"|No available memory for the cache blocks",
        "the cache that is left cannot hold one sequence of --max-model-len; the draft's rows and the padding of "
        "joined cache groups count, too",
        "plan again with a smaller --context, more devices, or a higher --utilisation; k3dspark plan shows the sizes",
    ),
    _failure(
        "out_of_memory",
        r"out of memory|OutOfMemoryError|NPU out of memory|Failed to allocate memory|EL0004|207001"
        r"|exit(ed)? (code|status) -?9\b|Killed process|oom-kill",
        "memory ran out, on a device or on the host",
        "plan again with fewer --sequences, a smaller --context or a lower --utilisation; look for other processes on "
        "the device",
    ),
    _failure(
        "hccl_timeout",
        r"HCCL.{0,160}(timeout|timed out)|EI0006|EI0002|ERR02200|HCCL_CONNECT_TIMEOUT|notify wait timeout",
        "NPUs did not reach each other in time: a node is missing, the interface is wrong, or one failed before",
        "look for an earlier error on the other nodes; check hosts, --interface and links (k3dspark check --nodes)",
    ),
    _failure(
        "nccl_timeout",
        r"NCCL.{0,120}(timeout|timed out|unhandled system error)|Watchdog caught collective operation timeout",
        "GPUs did not reach each other in time",
        "look for an earlier error on the other nodes; check hosts and --interface",
    ),
    _failure(
        "rendezvous",
        r"DistStoreError|DistNetworkError|(TCPStore|rendezvous).{0,120}(timed out|timeout|failed|refused)"
        r"|Timed out after .{0,40} waiting for clients",
        "the nodes did not find each other at the head",
        "start all nodes; check that the head's --rpc-port is open between them",
    ),
    _failure(
        "unsupported_option",
        r"unrecognized arguments?:|error: argument --|no such option|got an unexpected keyword argument"
        r"|Unexpected keyword argument|Extra inputs are not permitted",
        "this version of the engine does not have an option of the plan",
        "plan again with --engine-version as it is installed, so that what it lacks is refused beforehand",
    ),
    _failure(
        "decode_context_parallel",
        r"decode.context.parallel.{0,160}(not supported|unsupported|incompatible)|DCP.{0,80}not supported",
        "the MLA draft does not run with decode context parallel in this version",
        "plan again without --decode-context-parallel",
    ),
    _failure(
        "adaptive_needs_graphs",
        r"adaptive.verification.{0,160}(requires|needs|not supported|full cuda graph)",
        "adaptive verification needs full graphs, which this draft or device does not have here",
        "plan again without --adaptive",
    ),
    _failure(
        "cache_groups",
        r"(page size|page_size).{0,120}(unif|divisible|mismatch)|Unable to unify|KV cache spec.{0,60}not.{0,20}unif",
        "the caches of target and draft have rows that do not fit one page size (an 8-bit target cache beside bf16)",
        "use a target without an 8-bit cache, or give both the same cache dtype",
    ),
    _failure(
        "taps",
        r"(target_layer_ids|aux.hidden.state).{0,160}(out of range|mismatch|must|invalid|expected)",
        "the layers that the draft takes hidden states from do not fit this target",
        "check the pair: k3dspark inspect DRAFT --target TARGET",
    ),
    _failure(
        "port_taken",
        r"address already in use|EADDRINUSE|Errno 98|port .{0,20}(is )?(already )?in use",
        "another program listens on a port of the plan",
        "stop it, or plan again with another --port or --rpc-port",
    ),
    _failure(
        "device_busy",
        r"(device|NPU|GPU).{0,60}(is busy|in use by another|already in use)|drvRetCode=(7|87)\b",
        "another process holds a device",
        "find it with npu-smi info or nvidia-smi, and stop it",
    ),
    _failure(
        "driver",
        r"(driver|firmware).{0,80}(too old|mismatch|incompatible|insufficient)|libascend_hal\.so.{0,60}cannot open"
        r"|libhccl\.so.{0,60}cannot open|ImportError: libascend",
        "driver or CANN does not fit the engine, or its libraries are not on the path",
        "compare the versions with k3dspark check; source CANN's set_env.sh in the service's environment",
    ),
    _failure(
        "bf16",
        r"bfloat16.{0,80}(not supported|unsupported|requires)",
        "the device does not compute in bfloat16, which the draft's weights are in",
        "use a device that does; k3dspark check names it",
    ),
    _failure(
        "module_missing",
        r"ModuleNotFoundError: No module named|No module named vllm|No module named sglang",
        "the Python of the plan does not have the engine",
        "plan again with --python pointing at the Python that has it",
    ),
    _failure(
        "address",
        r"k3dspark: (cannot resolve|.* is 127\.|no interface)",
        "a node's host name does not lead to its address on the network between nodes",
        "write addresses into the hosts file, or correct name resolution",
    ),
    _failure(
        "padding",
        r"Add \d+ padding layers, may waste at most",
        "joining the draft to the target's cache groups wastes this share of the cache",
        "nothing to do; k3dspark plan counts it",
        fatal=False,
    ),
    _failure(
        "ready_timeout",
        r"(engine|EngineCore).{0,80}(did not become ready|failed to start|initialization failed)",
        "the engine's processes did not come up; the cause stands further up in the log",
        "read the first error in the log of every node",
    ),
)


def recognise(line: str) -> Failure | None:
    """The known failure that a line of a log tells of."""
    text = line[:4000]
    return next((failure for failure in FAILURES if failure.pattern.search(text)), None)
