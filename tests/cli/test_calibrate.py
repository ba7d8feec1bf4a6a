"""`k3dspark calibrate` on a small random pair: what it prints and writes, and that `generate` finds it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from k3dspark.cli.main import app
from k3dspark.decoding.calibration import CALIBRATION_FILE
from tiny_models import write_draft, write_target

TOKENS = ["-n", "48", "--count", "6", "--dtype", "float32"]


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    write_target(tmp_path / "target")
    write_draft(tmp_path / "draft")
    (tmp_path / "prompts.txt").write_text("".join(f"question {i}?\n" for i in range(6)))
    return ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_it_prints_json_writes_beside_the_draft_and_generate_finds_it(models: list[str], tmp_path: Path) -> None:
    prompts = ["--prompts", str(tmp_path / "prompts.txt")]
    done = run("calibrate", *models, *TOKENS, *prompts, "--setting", "temperature=1,top_p=0.9", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["file"] == str(tmp_path / "draft" / CALIBRATION_FILE)
    entry = found["settings"]["temperature=1,top_p=0.9"]
    assert list(entry) == ["temperatures", "shifts", "rounds", "prompts", "slots"]
    assert len(entry["slots"]) == len(entry["temperatures"]) == len(entry["shifts"]) == 7
    assert entry["prompts"] == {"fit": 3, "test": 3}
    survival = entry["slots"][0]["survival"]
    assert survival["before"]["count"] == survival["after"]["count"] == entry["rounds"]["test"]
    assert survival["after"]["brier"] <= survival["before"]["brier"] + 0.01

    stored = json.loads((tmp_path / "draft" / CALIBRATION_FILE).read_text())
    assert stored["draft"] == found["draft"]
    assert stored["settings"]["temperature=1,top_p=0.9"]["temperatures"] == pytest.approx(
        entry["temperatures"], abs=1e-6
    )

    sampled = ["--temperature", "1", "--schedule", "threshold", "-n", "8", "--json", "hello"]
    for options, expected in ((["--top-p", "0.9"], True), ([], False)):
        answer = json.loads(run("generate", *models, "--dtype", "float32", *options, *sampled).stdout)
        assert answer["calibrated"] is expected


def test_it_prints_a_table_for_every_setting_and_a_report_that_needs_no_network(
    models: list[str], tmp_path: Path
) -> None:
    report, out = tmp_path / "report.html", tmp_path / "elsewhere" / "calibration.json"
    settings = ["--setting", "greedy", "--setting", "temperature=1"]
    done = run("calibrate", *models, *TOKENS, *settings, "--out", str(out), "--report", str(report))
    assert done.exit_code == 0, done.stderr
    for heading in ("greedy", "temperature=1"):
        assert f"\n{heading}: survival by slot" in done.stdout
    assert set(json.loads(out.read_text())["settings"]) == {"greedy", "temperature=1"}
    assert not (tmp_path / "draft" / CALIBRATION_FILE).exists()
    page = report.read_text()
    assert page.count("Reliability of survival") == 2
    assert not re.search(r"""<(?:script|link|img)[^>]*(?:src|href)=""", page)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--setting", "warm"], "'warm' is not a sampling setting"),
        (["--setting", "temperature=1,top_p=3"], "top_p is 3.0"),
        (["--prompts", "no/such/file"], "no/such/file"),
        (["--count", "1"], "count"),
        (["--target", "."], "embedded draft fits the embedded target only"),
    ],
)
def test_bad_usage_is_refused_with_status_2(arguments: list[str], message: str) -> None:
    done = run("calibrate", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in " ".join(done.stderr.replace("│", "").split())


def test_a_draft_without_a_confidence_head_is_refused(models: list[str], tmp_path: Path) -> None:
    write_draft(tmp_path / "draft", enable_confidence_head=False)
    for command in (["calibrate", *models], ["generate", *models, "--schedule", "cost", "x"]):
        done = run(*command)
        assert done.exit_code == 2
        assert "enable_confidence_head" in done.stderr


@pytest.mark.parametrize("option", ["--out", "--report"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(
    models: list[str], tmp_path: Path, option: str
) -> None:
    prompts = ["--prompts", str(tmp_path / "prompts.txt")]
    for place in (tmp_path, tmp_path / "prompts.txt" / "file"):
        done = run("calibrate", *models, *TOKENS, *prompts, option, str(place))
        assert done.exit_code == 2
        assert "cannot write" in done.stderr
        assert not (tmp_path / "draft" / CALIBRATION_FILE).exists()
