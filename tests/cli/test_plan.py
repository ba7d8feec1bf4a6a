"""`k3dspark plan`: figures, files, refusals and their exit statuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from k3dspark.cli.main import app


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_the_published_figures_stand_in_the_first_lines() -> None:
    status, output = run()
    assert status == 0
    assert "weights 9.47 GB" in output
    assert "5,760 bytes a token" in output
    assert "6.04 GB at 1,048,576 tokens" in output
    assert "smallest device: 16 GB; for the whole context of 1M: 32 GB" in output


def test_json_holds_the_same_figures() -> None:
    status, output = run("--json", "--device-gb", "8,16")
    memory = json.loads(output)["memory"]
    assert status == 0
    assert memory["cache_bytes_per_token"] == 5760
    assert memory["smallest_device_gb"] == 16
    assert memory["smallest_device_gb_at_largest_context"] is None
    cell = memory["cells"][0]
    assert cell["total"] == sum(cell[part] for part in ("weights", "cache", "workspace", "overhead"))


def test_a_tiny_checkpoint_is_planned_and_written_for_a_cpu(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["synth", "--tiny", "--out", str(tmp_path / "pair")]).exit_code == 0
    out = tmp_path / "launch"
    status, output = run(
        str(tmp_path / "pair" / "draft"), "--engine", "vllm", "--device", "cpu", "--target",
        str(tmp_path / "pair" / "target"), "--out", str(out),
    )  # fmt: skip
    assert status == 0, output
    assert {p.name for p in out.iterdir()} == {
        "plan.json", "hosts", "health.sh", "node-0.sh", "supervise.sh", "k3dspark@.service", "kubernetes.yaml",
    }  # fmt: skip
    assert "--max-model-len 2048" in (out / "node-0.sh").read_text()
    assert run(str(tmp_path / "pair" / "draft"), "--engine", "vllm", "--target", "/t", "--out", str(out))[0] == 2


def test_an_engine_too_old_is_named_with_the_version_that_can(tmp_path: Path) -> None:
    status, output = run(
        "--engine", "vllm-ascend", "--engine-version", "0.23.0", "--target", "/t", "--out", str(tmp_path / "out")
    )
    assert status == 2
    assert "0.26.0rc1" in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--out", "x"),
        ("--engine", "vllm", "--out", "x"),
        ("--engine", "llama.cpp"),
        ("--contexts", "many"),
        ("--contexts", "0"),
        ("--dtype", "int3"),
        ("--utilisation", "2"),
        ("--utilisation", "nan"),
        ("--overhead-gb", "-1"),
        ("--overhead-gb", "nan"),
        ("/nowhere",),
    ],
    ids=" ".join,
)
def test_bad_usage_is_status_2_with_why_and_what_to_do(arguments: tuple[str, ...]) -> None:
    status, output = run(*arguments)
    assert status == 2
    assert re.search(r"why: .+\n +do: .+", output)


def test_the_report_is_one_file_with_its_charts(tmp_path: Path) -> None:
    status, _ = run("--report", str(tmp_path / "plan.html"), "--engine", "vllm-ascend", "--devices", "16")
    html = (tmp_path / "plan.html").read_text()
    assert status == 0
    assert html.count("Plotly.newPlot(") == 2
    assert "Known faults of this engine" in html
