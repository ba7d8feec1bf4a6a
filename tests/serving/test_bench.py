"""The load generator, against our own server and against one that misbehaves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from harness import Running, running
from typer.testing import CliRunner

from k3dspark.cli.bench import read_prompts
from k3dspark.cli.main import app
from k3dspark.embedded.pair import ModelPair
from k3dspark.errors import BadInput, EngineFault
from k3dspark.serving.load import Exchange, LoadSettings, find_model, run_load
from k3dspark.serving.load_report import percentiles, summarise
from k3dspark.serving.settings import Limits, Settings


def settings(server: Running) -> LoadSettings:
    return LoadSettings(
        server.url, ("one", "two"), "target", requests=6, warm_up=1, max_tokens=8, ignore_eos=True, concurrency=3
    )


@pytest.mark.parametrize("rate", [None, 50.0])
def test_every_request_is_sent_answered_and_timed(server: Running, rate: float | None) -> None:
    plan = replace(settings(server), rate=rate)
    before = server.metric("generation_tokens_total")
    exchanges, seconds = run_load(plan)
    result = summarise(plan, exchanges, seconds)
    assert (result.requests, result.failed, result.new_tokens) == (6, 0, 48)
    assert server.metric("generation_tokens_total") - before == 7 * 8, "the warm-up is not in the figures"
    assert result.tokens_per_second == pytest.approx(48 / seconds)
    for exchange in exchanges:
        assert exchange.sent < exchange.pieces[0] <= exchange.pieces[-1] <= exchange.ended
    assert result.first_token is not None
    assert result.whole is not None
    assert 0 < result.first_token.p50 <= result.whole.p50 <= result.whole.p99 <= seconds


def test_acceptance_is_pooled_from_what_the_server_reports(server: Running) -> None:
    plan = settings(server)
    exchanges, seconds = run_load(plan)
    rounds = sum(e.speculation["rounds"] for e in exchanges if e.speculation)
    accepted = sum(e.speculation["accepted_tokens"] for e in exchanges if e.speculation)
    assert summarise(plan, exchanges, seconds).acceptance_length == pytest.approx(1 + accepted / rounds)


def test_closed_loop_never_has_more_requests_open_than_clients(server: Running) -> None:
    exchanges, _ = run_load(settings(server))
    times = sorted([(e.sent, 1) for e in exchanges] + [(e.ended, -1) for e in exchanges])
    level = [sum(step for _, step in times[: i + 1]) for i in range(len(times))]
    assert max(level) <= 3


def test_percentiles_are_times_that_were_measured() -> None:
    found = percentiles([float(n) for n in range(1, 101)])
    assert found is not None
    assert (found.p50, found.p90, found.p99) == (50, 90, 99)
    alone = percentiles([None, 7.0])
    assert alone is not None
    assert (alone.p50, alone.p99) == (7, 7)
    assert percentiles([None]) is None


def test_failures_are_counted_and_do_not_flatter_the_figures() -> None:
    plan = LoadSettings("http://x", ("p",))
    good = Exchange(0.0, [0.1, 0.5], 0.6, 3, 5)
    result = summarise(plan, [good, Exchange(0.0, [], 0.01, error="status 429")], 2.0)
    assert (result.failed, result.first_error, result.requests_per_second) == (1, "status 429", 0.5)
    assert result.per_token is not None
    assert result.per_token.p50 == pytest.approx(0.1)
    assert result.acceptance_length is None


def test_a_server_that_refuses_everything_is_a_fault(pair: ModelPair) -> None:
    with running(pair, Settings(limits=Limits(new_tokens=2))) as server, pytest.raises(EngineFault, match="status 400"):
        run_load(settings(server))


def test_no_server_is_a_fault_with_a_remedy() -> None:
    with pytest.raises(EngineFault, match="cannot ask"):
        find_model("http://127.0.0.1:9")


def test_the_command_prints_json_and_writes_a_page(server: Running, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\nplain text\n\n{"question": "three"}\n')
    page = tmp_path / "load.html"
    done = CliRunner().invoke(
        app,
        ["bench", "--url", server.url, "-c", "1,2", "-n", "2", "--warm-up", "0", "--max-tokens", "4", "--ignore-eos",
         "--prompt-file", str(prompts), "--endpoint", "completions", "--json", "--report", str(page)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["settings"]["model"] == "target"
    assert report["settings"]["prompts"] == 3
    assert [(run["concurrency"], run["new_tokens"]) for run in report["runs"]] == [(1, 8), (2, 8)]
    html = page.read_text()
    assert "Load of target" in html
    assert "<link" not in html
    assert "<script src" not in html


def test_requests_that_fail_make_the_exit_status_1(pair: ModelPair) -> None:
    with running(pair, Settings(running=1, limits=Limits(queue=1))) as server:
        done = CliRunner().invoke(
            app, ["bench", "--url", server.url, "-c", "5", "-n", "5", "--warm-up", "0", "--max-tokens", "60",
                  "--ignore-eos"], env={"COLUMNS": "200"},
        )  # fmt: skip
    assert done.exit_code == 1
    assert "3 requests failed" in done.output
    assert "queue_full" in done.output


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "has no prompts"), ("{broken", "line 1"), ('ok\n{"x": 1}', "line 2")],
)
def test_a_wrong_prompt_file_is_refused(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "p"
    file.write_text(content)
    with pytest.raises(BadInput, match=words):
        read_prompts(file)


@pytest.mark.parametrize("options", [["-c", "0"], ["-c", "x"], ["--rate", "-1"], ["--endpoint", "images"]])
def test_nonsense_loads_are_refused(options: list[str]) -> None:
    assert CliRunner().invoke(app, ["bench", *options]).exit_code == 2
