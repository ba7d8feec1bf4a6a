"""`k3dspark diagnose` on saved figures and on a running server."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import k3dspark
from k3dspark.cli.main import app
from monitoring.test_live import serving
from scrapes import sample, vllm

HEALTHY = [3900, 2900, 2150, 1600, 1200, 900, 650]


def diagnose(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["diagnose", *arguments], env={"COLUMNS": "200"})


def save(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_one_saved_scrape_covers_all_since_the_start(tmp_path: Path) -> None:
    done = diagnose("--metrics", save(tmp_path, "m", vllm(5000, HEALTHY)), "--json")
    assert done.exit_code == 0, done.output
    (model,) = json.loads(done.stdout)["models"]
    assert model["found"] == []
    assert "no_break_even" in [item["id"] for item in model["unjudged"]]


def test_two_saved_scrapes_are_compared(tmp_path: Path) -> None:
    first = save(tmp_path, "a", vllm(5000, HEALTHY))
    second = save(tmp_path, "b", vllm(6000, HEALTHY))
    done = diagnose("--metrics", first, "--metrics", second, "--json")
    assert done.exit_code == 1
    (model,) = json.loads(done.stdout)["models"]
    (found,) = model["found"]
    assert (found["shape"], found["causes"][0]["id"]) == ("exactly_one", "not_loaded")


@pytest.mark.parametrize(("lang", "words"), [("en", "The first slot is fine"), ("zh", "第 1 个位置正常")])
def test_the_text_names_shape_cause_and_test(tmp_path: Path, lang: str, words: str) -> None:
    collapsed = save(tmp_path, "m", vllm(5000, [4100, 500, 50, 5, 0, 0, 0]))
    done = diagnose("--metrics", collapsed, "--lang", lang)
    assert done.exit_code == 1
    assert words in done.stdout
    assert "block_causal" in done.stdout


def test_saved_responses_add_what_counters_cannot_tell(tmp_path: Path) -> None:
    lines = [
        json.dumps(
            {
                "usage": {"prompt_tokens": context, "prompt_tokens_details": {"cached_tokens": context if warm else 0}},
                "metrics": {"speculative_decoding": {"rounds": 50, "accepted_tokens": accepted + index % 3}},
            }
        )
        for context, warm, accepted in ((5000, False, 110), (5000, True, 30))
        for index in range(6)
    ]
    responses = save(tmp_path, "r.jsonl", "\n".join(lines))
    done = diagnose("--metrics", save(tmp_path, "m", vllm(5000, HEALTHY)), "--requests", responses, "--json")
    assert done.exit_code == 1, done.output
    (model,) = json.loads(done.stdout)["models"]
    assert [found["shape"] for found in model["found"]] == ["warm_worse"]


def test_a_recording_of_the_monitor_is_read(tmp_path: Path) -> None:
    counts = iter(range(1, 10))

    def answer(_: str) -> tuple[int, str]:
        done = 1000 * next(counts)
        return 200, vllm(done, [done * share for share in (0.8, 0.6, 0.45, 0.34, 0.26, 0.2)])

    with serving(answer) as host:
        recorded = CliRunner().invoke(app, ["monitor", host, "--json", "--interval", "0.2", "--duration", "0.4"])
    assert recorded.exit_code == 0, recorded.output
    assert len(recorded.stdout.splitlines()) == 3
    done = diagnose("--metrics", save(tmp_path, "recording", recorded.stdout + '{"format": 1, "mod'), "--json")
    assert done.exit_code == 1, done.output
    (model,) = json.loads(done.stdout)["models"]
    assert [found["shape"] for found in model["found"]] == ["fewer_proposals"]


def test_a_running_server_is_watched_for_an_interval() -> None:
    counts = iter(range(1, 10))

    def answer(path: str) -> tuple[int, str]:
        if path != "/metrics":
            return 404, ""
        done = 2000 * next(counts)
        return 200, vllm(done, [done * share for share in (0.8, 0.6, 0.45, 0.34, 0.26, 0.2, 0.15)])

    with serving(answer) as host:
        done = diagnose("--url", host, "--interval", "0.2")
    assert done.exit_code == 0, done.output
    assert "nothing wrong found" in done.stdout


def test_a_server_that_does_not_answer_is_status_3() -> None:
    with serving(lambda _: (500, "")) as host:
        done = diagnose("--url", host, "--interval", "0.1")
    assert done.exit_code == 3


@pytest.mark.parametrize(
    "arguments", [[], ["--url", "a", "--metrics", "b"], ["--metrics", "/no/such/file"]], ids=["none", "both", "missing"]
)
def test_bad_usage_is_status_2(arguments: list[str]) -> None:
    assert diagnose(*arguments).exit_code == 2


def test_device_metrics_are_no_engine_s(tmp_path: Path) -> None:
    done = diagnose("--metrics", save(tmp_path, "m", sample("npu-exporter")))
    assert done.exit_code == 2


def test_the_half_that_reads_metrics_loads_no_torch() -> None:
    room = Path(k3dspark.__file__).parent / "diagnosis"
    names = ("evidence", "observation", "context", "shapes", "wording_en", "wording_zh", "__init__")
    for name in names:
        for node in ast.walk(ast.parse((room / f"{name}.py").read_text())):
            imported = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            imported += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            outside = {each for each in imported if each.startswith("k3dspark") and "diagnosis" not in each}
            assert outside <= {"k3dspark.errors"}, name
            assert not any(each.startswith("torch") for each in imported), name
