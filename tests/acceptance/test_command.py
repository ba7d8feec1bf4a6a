"""`k3dspark accept` between servers: what it prints, what it writes, and its exit statuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from acceptance.dialects import speaking
from acceptance.scripted import Scripted
from k3dspark.cli.main import app

SMALL = ("--lengths", "30", "--per-length", "2", "-n", "20")


def accept(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["accept", *arguments], env={"COLUMNS": "200"})


def between(baseline: Scripted, candidate: Scripted, *more: str, **how: Any) -> Result:
    with speaking(baseline) as one, speaking(candidate, **how) as other:
        return accept("--baseline", one, "--candidate", other, *SMALL, *more)


def test_equal_servers_are_accepted_and_the_report_says_what_that_excludes(tmp_path: Path) -> None:
    page = tmp_path / "deep" / "report.html"
    done = between(Scripted(), Scripted(), "--report", str(page))
    assert done.exit_code == 0, done.output
    assert "identical: " in done.stdout
    assert "is excluded at 95%" in done.stdout
    assert "tokens compared" in page.read_text()


def test_other_weights_are_a_difference_with_status_1() -> None:
    def other(history: Any) -> list[float]:
        from acceptance.scripted import law

        return law([*history, 1])

    done = between(Scripted(), Scripted(other), "--json")
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert told["format"] == 1
    assert told["verdict"]["outcome"] == "different"
    assert told["divergences"][0]["kind"] == "mismatch"
    assert "other_model" in [finding["id"] for finding in told["verdict"]["findings"]]


def test_sampled_tokens_of_another_temperature_are_told_apart() -> None:
    more = ("--mode", "sampled", "--draws", "60", "--json")
    assert between(Scripted(), Scripted(), *more).exit_code == 0

    class Warmer(Scripted):
        def ask(self, questions: Any) -> Any:
            from dataclasses import replace

            from k3dspark.acceptance.asking import Sampling

            return super().ask([replace(q, sampling=Sampling(4.0, seed=q.sampling.seed)) for q in questions])

    done = between(Scripted(), Warmer(), *more)
    assert done.exit_code == 1
    verdict = json.loads(done.stdout)["verdict"]
    assert verdict["smallest_adjusted_p"] < 0.01
    assert [finding["id"] for finding in verdict["findings"]] == ["distribution"]


def test_a_length_beyond_the_context_is_shortened_and_the_report_says_so() -> None:
    done = between(Scripted(context=100), Scripted(), "--lengths", "30,32K,128K")
    assert done.exit_code == 0, done.output
    assert "32K is beyond the context of 100 tokens: 80 instead, the most that fits" in done.stdout
    assert "left out, beyond the context of 100 tokens: 128K" in done.stdout


def test_inputs_of_a_file_are_asked_instead(tmp_path: Path) -> None:
    file = tmp_path / "inputs.jsonl"
    file.write_text('plain text\n{"token_ids": [1, 2], "name": "two", "max_tokens": 7}\n'
                    '{"messages": [{"role": "user", "content": "hi"}], "stop": "0102"}\n')  # fmt: skip
    done = between(Scripted(), Scripted(), "--inputs", str(file), "--cache", "off", "--json")
    assert done.exit_code == 0, done.output
    tally = json.loads(done.stdout)["tallies"][0]
    assert (tally["group"], tally["answers"]) == ("file", 3)


@pytest.mark.parametrize(
    "line", ['{"prompt": ""}', '{"token_ids": ["a"]}', "{", '{"messages": [1]}', '{"prompt": "a", "max_tokens": 0}',
             '{"prompt": "a", "token_ids": [1]}', '{"prompt": "a", "stop": [1]}'],
)  # fmt: skip
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "inputs.jsonl"
    file.write_text(f"fine\n{line}\n")
    done = between(Scripted(), Scripted(), "--inputs", str(file))
    assert done.exit_code == 2
    assert "line 2" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--baseline", "nowhere"),
        ("--baseline-draft", "."),
        ("--candidate", "embedded", "--candidate-model", "m"),
        ("--lengths", "1Q"),
        ("--candidate", "http://127.0.0.1:1", "--candidate-draft", "."),
        ("--tie", "nan"),
        ("--report", "/"),
    ],
    ids=" ".join,
)
def test_bad_options_are_refused_before_anything_is_loaded(arguments: tuple[str, ...]) -> None:
    with speaking(Scripted()) as url:
        sides = {"--baseline": url, "--candidate": url} | dict(zip(arguments[::2], arguments[1::2], strict=True))
        done = accept(*(part for pair in sides.items() for part in pair))
    assert done.exit_code == 2, done.output


def test_a_server_that_is_not_there_or_dies_has_status_3() -> None:
    with speaking(Scripted()) as url:
        assert accept("--baseline", url, "--candidate", "http://127.0.0.1:9", *SMALL).exit_code == 3
    done = between(Scripted(), Scripted(), broken_after=3)
    assert done.exit_code == 3
    assert "status 500" in done.stderr
