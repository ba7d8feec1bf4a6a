"""Run by vLLM's Python, not by the tests': reads a question as JSON, prints the answer as the last line."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from typing import Any


def parse(commands: list[list[str]]) -> list[dict[str, Any]]:
    """What vLLM's own parser makes of each server command line (the words after the program)."""
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    known = {field.name for field in fields(SpeculativeConfig)}
    parser = make_arg_parser(FlexibleArgumentParser())  # takes a second to build
    answers = []
    for words in commands:
        try:
            arguments = parser.parse_args(words)
            validate_parsed_serve_args(arguments)
            AsyncEngineArgs.from_cli_args(arguments)
            unknown = sorted(set(arguments.speculative_config) - known)
            error = f"unknown in --speculative-config: {unknown}" if unknown else None
            answers.append({"error": error, "speculative": arguments.speculative_config})
        except (Exception, SystemExit) as fault:  # noqa: BLE001
            answers.append({"error": f"{type(fault).__name__}: {fault}", "speculative": None})
    return answers


def drafts(question: dict[str, Any]) -> dict[str, Any]:
    """Greedy answers without and with the draft, and every block that was drafted for the first prompt."""
    from vllm import LLM, SamplingParams
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    blocks: list[list[int]] = []
    propose = DSparkSpeculator.propose

    def watch(self: Any, *arguments: Any, **options: Any) -> Any:
        proposed = propose(self, *arguments, **options)
        blocks.append(proposed[0].tolist())
        return proposed

    DSparkSpeculator.propose = watch
    llm = LLM(
        question["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=2,
        kv_cache_memory_bytes=128 << 20,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config={
            "method": "dspark",
            "model": question["draft"],
            "num_speculative_tokens": question["proposals"],
        },
    )
    sampling = SamplingParams(temperature=0, max_tokens=question["tokens"], ignore_eos=True)
    (answer,) = llm.generate([{"prompt_token_ids": question["prompt"]}], sampling, use_tqdm=False)
    figures = {m.name: getattr(m, "value", None) for m in llm.get_metrics() if "spec_decode" in m.name}
    return {"tokens": list(answer.outputs[0].token_ids), "blocks": blocks, "metrics": figures}


if __name__ == "__main__":
    answer = {"parse": parse, "drafts": drafts}[sys.argv[1]](json.load(sys.stdin))
    print(json.dumps(answer), flush=True)
