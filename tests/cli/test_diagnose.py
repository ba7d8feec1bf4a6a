"""`k3dspark diagnose` by experiment, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from diagnosis.faults import planted
from diagnosis.small_pair import NEW_TOKENS, PROMPTS, copy, write_pair
from k3dspark.cli.main import app
from k3dspark.diagnosis.subject import open_subject


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A pair whose taps are one layer early."""
    folder = tmp_path_factory.mktemp("pair")
    target, draft = write_pair(folder, steps=60)
    damaged = copy(draft, folder / "damaged")
    planted(65)["taps_early"](damaged, open_subject(target, draft, "float32").wiring)
    return target, damaged


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return path


def diagnose(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["diagnose", *map(str, arguments)], env={"COLUMNS": "200"})


def test_the_cause_is_named_in_words_and_on_a_page(broken: tuple[Path, Path], prompts: Path, tmp_path: Path) -> None:
    target, draft = broken
    page = tmp_path / "report.html"
    done = diagnose(
        "--target", target, "--draft", draft, "--prompts", prompts, "--new-tokens", NEW_TOKENS, "--report", page
    )
    assert done.exit_code == 1, done.output
    assert "your taps are one layer early" in done.stdout
    assert "your taps are one layer early" in page.read_text()
    assert "://" not in page.read_text().replace("http://www.w3.org", "")


def test_the_record_has_the_change_and_its_intervals(broken: tuple[Path, Path], prompts: Path) -> None:
    target, draft = broken
    done = diagnose(
        "--target", target, "--draft", draft, "--prompts", prompts, "--new-tokens", NEW_TOKENS, "--json", "--lang", "zh"
    )
    record = json.loads(done.stdout)
    cause = record["causes"][0]
    assert (record["verdict"], cause["id"], cause["with"]) == ("cause_found", "taps_early", "layers [1, 3, 5]")
    assert cause["title"] == "抽取层早了一层"
    low, high = cause["gain_interval"]
    assert record["margin_nats"] < low < cause["gain_nats"] < high


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--draft", "d", "--url", "http://localhost:1"], "metrics beside an experiment"),
        (["--metrics", "m", "--report", "r.html"], "--report without a pair"),
        (["--experiment", "--prompts", "absent.txt"], "cannot read absent.txt"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], words: str) -> None:
    done = diagnose(*arguments)
    assert done.exit_code == 2
    assert words in done.stderr


def test_a_target_without_its_draft_is_refused(broken: tuple[Path, Path]) -> None:
    done = diagnose("--target", broken[0])
    assert done.exit_code == 2
    assert "no draft for" in done.stderr
