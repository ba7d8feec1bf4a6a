"""`k3dspark tune`: from two files to a table, a report and the launch files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from k3dspark.cli.main import app


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    """Reading weights takes 20 ms; beyond 16 rows each row costs 0.4 ms more."""
    steps = [
        {"requests": r, "length": k, "seconds": 0.02 + 0.004 * (k > 0) + 0.0004 * max(r * (k + 1) - 16, 0)}
        for r in (1, 8, 32)
        for k in (0, 1, 7)
    ]
    (tmp_path / "costs.json").write_text(json.dumps({"format": 1, "steps": steps}))
    return tmp_path / "costs.json"


def run(*arguments: str) -> tuple[int, str]:
    quick = ("--acceptance", "0.9,0.8,0.7", "--requests", "20", "--output-tokens", "10", "--users", "1,8")
    result = CliRunner().invoke(app, ["tune", *arguments, *quick], env={"COLUMNS": "160"})
    return result.exit_code, result.output


def test_json_names_every_policy_at_every_load(costs: Path, tmp_path: Path) -> None:
    status, output = run(str(costs), "--json", "--report", str(tmp_path / "tune.html"))
    tuning = json.loads(output)
    assert status == 0
    assert [load["users"] for load in tuning["loads"]] == [1, 8]
    names = [policy["policy"] for policy in tuning["loads"][0]["policies"]]
    assert names == ["no draft", "fixed 1", "fixed 2", "fixed 3", "by batch size", "adaptive"]
    assert tuning["acceptance_length"] == pytest.approx([1.0, 1.9, 2.7, 3.4])
    assert (tmp_path / "tune.html").read_text().count("Plotly.newPlot(") == 2


def test_the_result_is_written_into_a_plan(costs: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    made = CliRunner().invoke(app, ["plan", "--engine", "vllm", "--target", "/t", "--out", str(plan)])
    assert made.exit_code == 0, made.output
    status, output = run(str(costs), "--into", str(plan))
    assert status == 0, output
    assert "k3dspark launch" in output
    wish = json.loads((plan / "plan.json").read_text())["wish"]
    assert wish["draft_tokens"] == 3


def test_unusable_input_is_status_2(costs: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"format": 1, "steps": []}')
    assert run(str(tmp_path / "bad.json"))[0] == 2
    assert run(str(costs), "--into", str(tmp_path))[0] == 2
    assert run(str(costs), "--engine", "none")[0] == 2
