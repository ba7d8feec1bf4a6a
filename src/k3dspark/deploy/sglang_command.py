"""The command and environment of SGLang for one node, each part with its reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from k3dspark.deploy.lines import Option, Variable, option
from k3dspark.deploy.options import Settled
from k3dspark.deploy.vllm_command import HEAD, ascend_environment

_WEIGHTS_SHARE: Final = 0.72


def sglang_command(settled: Settled) -> list[Option]:
    return [option(settled.wish.python, "-m", "sglang.launch_server", why="the server as a module of the same Python")]


def sglang_options(settled: Settled, node: int) -> list[Option]:
    """Every option of node `node`'s server."""
    return [*_model(settled), *_cluster(settled, node), *_limits(settled), *_draft(settled)]


def _model(settled: Settled) -> Iterable[Option]:
    wish = settled.wish
    yield option("--model-path", wish.target, why="the target: its output is what clients get, the draft only proposes")
    yield option("--served-model-name", wish.served_name, why="the name clients ask for, whatever the path is")
    if wish.quantization:
        yield option("--quantization", wish.quantization, why="how the target's weights are stored")
    if wish.trust_remote_code:
        yield option("--trust-remote-code", why="asked for: runs Python that lies in the checkpoint")
    if settled.facts.for_kimi_k3:
        yield option("--reasoning-parser", "kimi_k3", why="separates thinking from the answer")


def _cluster(settled: Settled, node: int) -> Iterable[Option]:
    wish = settled.wish
    yield option("--tp-size", str(wish.tensor_parallel), why="one tensor parallel group over every device of all nodes")
    if wish.nodes > 1:
        yield option("--nnodes", str(wish.nodes), why="nodes that start together")
        yield option("--node-rank", str(node), why="this one; unique on each node")
        yield Option(("--dist-init-addr", f"{HEAD}:{wish.rpc_port}"), "every node meets at the head", expand=True)
        yield option("--dp-size", str(settled.data_parallel), why="attention is replicated, once a node")
        yield option("--enable-dp-attention", why="latent rows cannot be split over heads; replicas share them out")
        yield option("--enable-dp-lm-head", why="keeps logits within a replica")
    if settled.on_npu:
        yield option("--device", "npu", why="Ascend")
        yield option("--attention-backend", "ascend", why="the backend that the NPU path was validated with")
        if settled.facts.for_kimi_k3:
            yield option("--moe-a2a-backend", "deepep", why="expert traffic between devices, the validated way")
    yield option(
        "--host", "0.0.0.0" if wish.nodes > 1 else "127.0.0.1", why="there is no key: let only the gateway reach it"
    )
    yield option("--port", str(wish.port), why="where health.sh, clients and Prometheus look")


def _limits(settled: Settled) -> Iterable[Option]:
    wish = settled.wish
    yield option("--context-length", str(wish.context), why="prompt and answer together")
    yield option(
        "--max-running-requests",
        str(wish.sequences * settled.data_parallel),
        why="over all replicas; beyond it requests wait",
    )
    share = min(wish.utilisation, _WEIGHTS_SHARE) if settled.on_npu else wish.utilisation
    yield option(
        "--mem-fraction-static",
        f"{share:g}",
        why="weights and cache; workspace and links take the rest, on NPUs over a quarter",
    )
    if not wish.prefix_caching:
        yield option("--disable-radix-cache", why="keeps prefix hits out of acceptance until they are measured here")
    if wish.eager:
        yield option("--disable-cuda-graph", why="asked for: no graphs")
    elif settled.on_npu:
        yield option("--cuda-graph-bs-decode", "1", "4", "16", why="the sizes that the NPU path was validated with")
    yield option("--enable-metrics", why="acceptance and throughput at /metrics; off by default")


def _draft(settled: Settled) -> Iterable[Option]:
    wish = settled.wish
    yield option("--speculative-algorithm", "DSPARK", why="a block drafted at once from the target's hidden states")
    yield option("--speculative-draft-model-path", wish.draft, why="the draft")
    yield option(
        "--speculative-dspark-block-size", str(wish.draft_tokens), why="proposals in a block; one row more is verified"
    )
    yield option("--speculative-eagle-topk", "1", why="one chain, no tree")
    yield option("--speculative-draft-model-quantization", "unquant", why="the draft is bf16, whatever the target is")
    if settled.on_npu:
        yield option("--speculative-draft-attention-backend", "ascend", why="the draft's attention on the same kernels")
        yield option("--linear-attn-verify-backend", "triton", why="verifies recurrent layers row by row")


def sglang_environment(settled: Settled, node: int) -> list[Variable]:
    """Every variable of node `node`."""
    wish = settled.wish
    mode = "compact" if wish.adaptive else "static"
    variables = [
        Variable("HF_HUB_OFFLINE", "1", "nothing is downloaded at start: models lie on disk"),
        Variable("SGLANG_RAGGED_VERIFY_MODE", mode, "static verifies everything drafted; compact follows confidence"),
    ]
    if settled.on_npu:
        variables += [
            *ascend_environment(settled),
            Variable("SGLANG_SET_CPU_AFFINITY", "1", "binds workers to the CPU cores near their device"),
            Variable("SGLANG_DSPARK_FOLDED_PROPOSAL", "1", "greedy proposals inside the draft's graph, as validated"),
            Variable("SGLANG_DSPARK_FOLDED_SAMPLING", "0", "folded sampling lowered acceptance on Ascend"),
        ]
    elif wish.nodes > 1:
        variables += [
            Variable("NCCL_SOCKET_IFNAME", "$interface", "NCCL must not pick a management network", expand=True),
            Variable("GLOO_SOCKET_IFNAME", "$interface", "the same for the control plane", expand=True),
        ]
    return variables
