"""The command and environment of vLLM and vLLM-Ascend for one node, each part with its reason."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from k3dspark.deploy.lines import Option, Variable, option
from k3dspark.deploy.options import Settled

HEAD: Final = "${hosts[0]}"


def vllm_command(settled: Settled) -> list[Option]:
    """The program itself, as a module of the Python that was named. Only `serve` knows --headless; only the plain
    server starts in the CPU build, whose `serve` looks for a distribution of another name."""
    wish = settled.wish
    if wish.device == "cpu":
        server = ("-m", "vllm.entrypoints.openai.api_server", "--model", wish.target)
    else:
        server = ("-m", "vllm.entrypoints.cli.main", "serve", wish.target)
    return [option(wish.python, *server, why="the target: its output is what clients get, the draft only proposes")]


def vllm_options(settled: Settled, node: int) -> list[Option]:
    """Every option of node `node`'s server."""
    return [
        *_model(settled),
        *_listening(settled, node),
        *_parallelism(settled, node),
        *_limits(settled),
        *_kimi_k3(settled),
        Option(
            ("--speculative-config", json.dumps(speculative_config(settled), separators=(", ", ": "))),
            "the draft. The method is named because the engine guesses wrong for K3DSparkModel; the number counts "
            "proposals, one row more is verified",
        ),
    ]


def speculative_config(settled: Settled) -> dict[str, Any]:
    """The object of --speculative-config."""
    wish = settled.wish
    config: dict[str, Any] = {
        "method": "dspark",
        "model": wish.draft,
        "num_speculative_tokens": wish.draft_tokens,
        "draft_tensor_parallel_size": wish.draft_tensor_parallel,
        "draft_sample_method": wish.sampling,
        "rejection_sample_method": wish.rejection,
    }
    if settled.engine.name == "vllm-ascend":
        # The draft was validated in eager mode; its captured graphs are newer (vllm-ascend#16347).
        config["enforce_eager"] = True
    if wish.device == "cuda" and settled.facts.for_kimi_k3:
        config["attention_backend"] = "FLASHINFER_MLA"
    if wish.cache_dtype != "auto":
        config["kv_cache_dtype"] = wish.cache_dtype
    if wish.lengths:
        config["num_speculative_tokens_per_batch_size"] = [list(item) for item in wish.lengths]
    if wish.adaptive:
        config["enable_adaptive_verification"] = True
    return config


def _model(settled: Settled) -> Iterable[Option]:
    wish = settled.wish
    yield option("--served-model-name", wish.served_name, why="the name clients ask for, whatever the path is")
    if wish.device == "cpu":
        yield option("--dtype", "float32", why="16-bit rounding makes speculative and plain output differ, and is slow")
    if wish.quantization:
        yield option("--quantization", wish.quantization, why="how the target's weights are stored")
    if wish.trust_remote_code:
        yield option("--trust-remote-code", why="asked for: runs Python that lies in the checkpoint")


def _listening(settled: Settled, node: int) -> Iterable[Option]:
    wish = settled.wish
    if node:
        yield option("--headless", why="only the head answers clients; this node works for it")
        return
    host = "0.0.0.0" if wish.nodes > 1 else "127.0.0.1"
    why = (
        "every interface: there is no key, so let only the gateway reach this port"
        if wish.nodes > 1
        else ("this machine only; put a gateway with a key in front before opening it")
    )
    yield option("--host", host, why=why)
    yield option("--port", str(wish.port), why="where health.sh, clients and Prometheus look")


def _parallelism(settled: Settled, node: int) -> Iterable[Option]:
    wish, replicas = settled.wish, settled.data_parallel
    if wish.tensor_parallel > 1:
        yield option(
            "--tensor-parallel-size",
            str(wish.tensor_parallel),
            why="splits each layer within a node, where "
            "links are fast; the latent cache is not split, each device holds it whole",
        )
    if wish.pipeline_parallel > 1:
        yield option("--pipeline-parallel-size", str(wish.pipeline_parallel), why="stages, by a build that relays taps")
    if wish.decode_context_parallel > 1:
        yield option(
            "--decode-context-parallel-size",
            str(wish.decode_context_parallel),
            why="splits the cache along the context, by a build that allows it with the MLA draft",
        )
    if replicas > 1:
        local = wish.devices // wish.tensor_parallel
        yield option("--data-parallel-size", str(replicas), why="replicas of attention over all nodes")
        yield option("--data-parallel-size-local", str(local), why="of them on this node")
        if node:
            yield option("--data-parallel-start-rank", str(node * local), why="the first of them; unique on each node")
        yield Option(("--data-parallel-address", HEAD), "every node meets at the head", expand=True)
        yield option("--data-parallel-rpc-port", str(wish.rpc_port), why="the same on all nodes and open between them")
    if settled.facts.for_kimi_k3 and wish.device != "cpu":
        yield option("--enable-expert-parallel", why="896 experts spread over all devices, not each one split")


def _limits(settled: Settled) -> Iterable[Option]:
    wish = settled.wish
    yield option(
        "--max-model-len",
        str(wish.context),
        why="prompt and answer together; the cache must hold at least one such sequence or the engine refuses to start",
    )
    yield option("--max-num-seqs", str(wish.sequences), why="sequences at once in a replica; beyond it requests wait")
    if wish.device == "cpu":
        yield option("--kv-cache-memory-bytes", str(512 << 20), why="otherwise the CPU build claims most of the memory")
    else:
        yield option(
            "--gpu-memory-utilization",
            f"{wish.utilisation:g}",
            why="share of device memory for weights, "
            "cache and workspace; the rest is for the driver and communication buffers",
        )
    if wish.prefix_caching:
        yield option(
            "--enable-prefix-caching",
            why="asked for, although the draft's context rows are missing for cached "
            "tokens: watch acceptance on prompts that share a prefix (vllm#47930)",
        )
    else:
        yield option(
            "--no-enable-prefix-caching",
            why="acceptance collapses on prefix-cache hits, because the draft's "
            "context rows are not written for cached tokens (vllm#47930)",
        )
    if wish.eager:
        yield option("--enforce-eager", why="no graphs: asked for, or the CPU build has none")
    elif settled.on_npu:
        lengths = {wish.draft_tokens, *(length for _, _, length in wish.lengths)}
        sizes = sorted({n * (k + 1) for n in (1, 2, 4, 8, wish.sequences) for k in lengths})
        graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
        yield option(
            "--compilation-config",
            json.dumps(graphs),
            why="graphs of decode steps only, the validated mode; "
            "sizes are rows, and each sequence verifies one row more than it drafts",
        )


def _kimi_k3(settled: Settled) -> Iterable[Option]:
    if not settled.facts.for_kimi_k3:
        return
    yield option("--reasoning-parser", "kimi_k3", why="separates thinking from the answer")
    yield option("--enable-auto-tool-choice", why="tool calls without a forced choice")
    yield option("--tool-call-parser", "kimi_k3", why="Kimi K3's format of tool calls")
    if settled.on_npu:
        yield option("--tokenizer-mode", "kimi_k3", why="Kimi K3's tokenizer, built in: no code from the checkpoint")
        # FlashComm1 was validated on A3 only.
        extra = {"enable_cpu_binding": True, "enable_flashcomm1": settled.wish.device == "npu-a3"}
        yield option(
            "--additional-config",
            json.dumps(extra),
            why="binds workers to the CPU cores near their device; FlashComm1 is validated on A3 only",
        )


def vllm_environment(settled: Settled, node: int) -> list[Variable]:
    """Every variable of node `node`."""
    wish = settled.wish
    common = [
        Variable("HF_HUB_OFFLINE", "1", "nothing is downloaded at start: models lie on disk"),
        Variable("VLLM_NO_USAGE_STATS", "1", "no statistics leave the cluster"),
        Variable("VLLM_WORKER_MULTIPROC_METHOD", "spawn", "a forked worker cannot use the device context it inherits"),
    ]
    if not node:
        common.append(Variable("VLLM_ENGINE_READY_TIMEOUT_S", "7200", "loading Kimi K3 takes longer than the default"))
    if settled.on_npu:
        return [*common, *ascend_environment(settled)]
    if wish.device == "cpu":
        return [
            *common,
            Variable("VLLM_USE_V2_MODEL_RUNNER", "1", "only this runner knows the method dspark"),
            Variable("TRITON_INTERPRET", "1", "the engine's kernels run in Triton's interpreter: correct, not fast"),
            Variable(
                "PYTHONPATH",
                "$interpreter${PYTHONPATH:+:$PYTHONPATH}",
                "for this server only: without the interpreter, kernels of other methods could not be compiled",
                expand=True,
            ),
        ]
    common.append(Variable("VLLM_USE_V2_MODEL_RUNNER", "1", "only this runner knows the method dspark"))
    if wish.nodes > 1:
        common += [
            Variable("VLLM_HOST_IP", "$local_ip", "the address other nodes reach this one at", expand=True),
            Variable("NCCL_SOCKET_IFNAME", "$interface", "NCCL must not pick a management network", expand=True),
            Variable("GLOO_SOCKET_IFNAME", "$interface", "the same for the control plane", expand=True),
        ]
    return common


def ascend_environment(settled: Settled) -> list[Variable]:
    """What every engine on Ascend needs: links, memory, device order."""
    wish = settled.wish
    a2 = wish.device == "npu-a2"
    devices = ",".join(map(str, range(wish.devices)))
    variables = [
        Variable("ASCEND_RT_VISIBLE_DEVICES", devices, "the devices of this node, in order"),
        Variable("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", "without it memory fragments at long contexts"),
        Variable("HCCL_CONNECT_TIMEOUT", "1800", "nodes load at different speeds and must wait for each other"),
        Variable(
            "HCCL_BUFFSIZE", "256" if a2 else "800", "MiB a communicator: expert traffic needs more than the default"
        ),
        Variable("OMP_PROC_BIND", "false", "the engine binds its threads itself"),
        Variable("OMP_NUM_THREADS", "10" if a2 else "1", "more threads than cores a device slow every worker"),
        Variable("TASK_QUEUE_ENABLE", "1", "operators are dispatched from a thread of their own"),
    ]
    if a2:
        variables.append(
            Variable(
                "HCCL_INTRA_ROCE_ENABLE",
                "1",
                "A2 nodes talk over RoCE; do not set HCCL_OP_EXPANSION_MODE=AIV here, it fails on A2",
            )
        )
    if wish.nodes > 1:
        names = ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
        variables.append(Variable("HCCL_IF_IP", "$local_ip", "the address HCCL binds to", expand=True))
        variables += [
            Variable(name, "$interface", "the network between nodes, never the management one", expand=True)
            for name in names
        ]
    return variables
