"""Lines that engines really print lead to what they mean; healthy lines lead to nothing."""

from __future__ import annotations

import pytest

from k3dspark.deploy.failures import FAILURES, recognise

LINES = [
    ("architecture_unknown", "ValueError: Model architectures ['K3DSparkModel'] are not supported for now."),
    ("architecture_unknown", "The checkpoint you are trying to load has model type `k3_dspark` but Transformers does "
     "not recognize this architecture."),
    ("method_unknown", "  Input should be 'ngram', 'eagle' or 'medusa' [type=literal_error, input_value='dspark']: "
     "dspark is not a valid method"),
    ("wrong_draft_class", "AttributeError: 'NoneType' object has no attribute 'weight'"),
    ("architectures_missing", "    initial_architecture = hf_config.architectures[0]"),
    ("lfs_pointer", "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge"),
    ("lfs_pointer", "k3dspark: /m/model.safetensors is a Git LFS pointer, not weights: run git lfs pull in /m"),
    ("weights_damaged", "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer"),
    ("file_missing", "k3dspark: /models/draft/config.json is missing: fetch the draft again (k3dspark fetch)"),
    ("remote_code", "Please pass the argument `trust_remote_code=True` to allow custom code to be run."),
    ("cache_too_small", "ValueError: To serve at least one request with the models's max seq len (1048576), (35.3 GiB "
     "KV cache is needed, which is larger than the available KV cache memory (11.2 GiB)."),
    ("out_of_memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.10 GiB."),
    ("out_of_memory", "RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 3; 61.28 GiB total capacity)"),
    ("hccl_timeout", "[ERROR] HCCL(4242,python3): connect timeout, timeout[120]s"),
    ("hccl_timeout", "EI0006: Getting socket times out. Reason: Remote Rank did not send the data in time."),
    ("nccl_timeout", "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)"),
    ("rendezvous", "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 3/4 joined."),
    ("unsupported_option", "api_server.py: error: unrecognized arguments: --no-such-option 3"),
    ("unsupported_option", "pydantic: num_speculative_tokens_per_batch_size: Unexpected keyword argument"),
    ("port_taken", "OSError: [Errno 98] Address already in use"),
    ("driver", "ImportError: libascend_hal.so: cannot open shared object file: No such file or directory"),
    ("module_missing", "/usr/bin/python3: No module named vllm"),
    ("address", "k3dspark: npu7 is 127.0.1.1 here: name its address between nodes"),
    ("padding", "WARNING kv_cache_utils.py:1208] Add 18 padding layers, may waste at most 26.09% KV cache memory"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "line"), LINES, ids=lambda value: value[:40])
def test_a_line_of_an_engine_is_recognised(name: str, line: str) -> None:
    found = recognise(line)
    assert found is not None
    assert found.id == name
    assert found.means
    assert found.remedy


@pytest.mark.parametrize(
    "line",
    [
        "INFO 11-30 12:00:01 [loader.py:12] Loading weights took 812.4 seconds",
        "INFO: Available KV cache memory: 36.20 GiB",
        "INFO: 10.0.0.7:4242 - POST /v1/chat/completions HTTP/1.1 200 OK",
        "Capturing graphs (decode, FULL): 100%",
        "",
    ],
)
def test_a_healthy_line_is_no_failure(line: str) -> None:
    assert recognise(line) is None


def test_a_line_without_end_is_looked_at_quickly() -> None:
    assert recognise("HCCL " * 200_000) is None


def test_every_failure_has_an_example() -> None:
    named = {name for name, _ in LINES}
    rare = {"decode_context_parallel", "adaptive_needs_graphs", "cache_groups", "taps", "device_busy", "bf16",
            "ready_timeout"}  # fmt: skip
    assert {failure.id for failure in FAILURES} == named | rare
