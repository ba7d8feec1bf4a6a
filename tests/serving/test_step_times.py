"""`bench --costs`: the time of a step on a running server, in the form that `tune` takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import Running
from typer.testing import CliRunner

from k3dspark.cli.main import app
from k3dspark.deploy.acceptance_profile import read_profile
from k3dspark.deploy.step_costs import read_costs
from k3dspark.errors import BadInput, CheckFailed
from k3dspark.serving.load import Exchange
from k3dspark.serving.step_times import StepTime, add_to_table, step_time


def exchange(rounds: int, accepted: int, step: float, sent: float = 0.0) -> Exchange:
    """A request of so many rounds after its first token, which came half a second after it was sent."""
    first = sent + 0.5
    end = first + rounds * step
    return Exchange(sent, [first, end], end, prompt_tokens=20, new_tokens=1 + rounds + accepted)


def test_a_step_is_the_time_of_all_rounds_over_their_number() -> None:
    step = step_time([exchange(10, 6, 0.02), exchange(30, 4, 0.02, 0.3)], 2, 3, (6, 3, 1))
    assert step.seconds == pytest.approx(0.02)
    assert step.survival == pytest.approx((6 / 40, 3 / 40, 1 / 40))
    assert step.prompt_seconds == pytest.approx((0.5 - 0.02) / 20)


def test_without_a_draft_every_token_is_a_round() -> None:
    step = step_time([exchange(40, 0, 0.01)], 1, 0, ())
    assert (step.length, step.survival) == (0, ())
    assert step.seconds == pytest.approx(0.01)


def test_too_few_rounds_and_failed_requests_give_no_time() -> None:
    with pytest.raises(CheckFailed, match="only 3 rounds"):
        step_time([exchange(3, 0, 0.01)], 1, 0, ())
    with pytest.raises(CheckFailed, match="fail"):
        step_time([exchange(40, 0, 0.01), Exchange(0.0, error="status 500")], 1, 0, ())


def test_runs_against_several_servers_become_one_table(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    add_to_table(path, [StepTime(1, 7, 0.05, (0.5,) * 7, 0.004), StepTime(4, 7, 0.09, (0.4,) * 7, 0.01)], "first")
    add_to_table(path, [StepTime(1, 0, 0.03, (), 0.002), StepTime(4, 0, 0.04, (), 0.02)], "second")
    add_to_table(path, [StepTime(1, 0, 0.05, (), 0.002)], "third")
    table = read_costs(path)
    assert table.step(1, 7) == 0.05
    assert table.step(1, 0) == pytest.approx(0.04), "samples of one point are joined by their median"
    assert table.prefill_seconds_per_token == 0.002, "a draft's pass is in its own steps, not in the prompt's time"
    assert read_profile(str(path)).slots == 7


def test_a_file_that_is_no_table_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    path.write_text('{"text": "hello"}')
    with pytest.raises(BadInput, match="no cost table"):
        add_to_table(path, [StepTime(1, 0, 0.03, (), 0.0)], "bench")
    assert path.read_text() == '{"text": "hello"}'


def test_bench_writes_what_tune_reads(server: Running, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    bench = ["bench", "--url", server.url, "-n", "4", "--warm-up", "1", "--max-tokens", "16", "--ignore-eos",
             "--endpoint", "completions", "--costs", str(path), "-c"]  # fmt: skip
    drafted = CliRunner().invoke(app, [*bench, "1,2"])
    assert drafted.exit_code == 0, drafted.output
    table = json.loads(path.read_text())
    assert [(step["requests"], step["length"]) for step in table["steps"]] == [(1, 7), (2, 7)]
    assert len(table["survival"]) == 7
    alone = CliRunner().invoke(app, ["tune", str(path), "--users", "1"])
    assert alone.exit_code == 2, "nothing was measured without a draft yet"
    # A server without a draft would write these; the length is told, since this one has a draft.
    plain = CliRunner().invoke(app, [*bench, "1", "--draft-tokens", "0"])
    assert plain.exit_code == 0, plain.output
    tuned = CliRunner().invoke(
        app,
        [
            "tune",
            str(path),
            "--users",
            "1",
            "--requests",
            "5",
            "--output-tokens",
            "8",
            "--prompt-tokens",
            "9",
            "--json",
        ],
    )
    assert tuned.exit_code == 0, tuned.output
    assert json.loads(tuned.stdout)["loads"][0]["users"] == 1


def test_costs_need_a_closed_loop_and_the_engines_own_counters(server: Running, tmp_path: Path) -> None:
    path = str(tmp_path / "costs.json")
    open_loop = CliRunner().invoke(app, ["bench", "--url", server.url, "--rate", "5", "--costs", path])
    assert open_loop.exit_code == 2
    assert "--costs with --rate" in open_loop.output
