"""The checklist on a tiny pair: killed and resumed, archived, and compared with a run of a changed draft."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import k3dspark
from diagnosis.small_pair import PROMPTS, change_config, copy, write_pair
from k3dspark.cli.main import app
from k3dspark.errors import BadInput
from k3dspark.runbook.archive import Archive
from k3dspark.runbook.diff import differences
from k3dspark.runbook.report import markdown, page
from k3dspark.runbook.run import Record, read, run
from k3dspark.runbook.steps import STEPS
from killable_runbook import HELD_AT, asked

TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    return write_pair(folder)


@pytest.fixture(scope="module")
def killed(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive of a run that was killed half way."""
    archive = tmp_path_factory.mktemp("archive")
    program = [sys.executable, str(TESTS / "killable_runbook.py"), *map(str, (*pair, archive))]
    paths = {**os.environ, "PYTHONPATH": str(Path(k3dspark.__file__).parent.parent)}
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=paths) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        process.kill()
    return archive


@pytest.fixture(scope="module")
def resumed(pair: tuple[Path, Path], killed: Path) -> tuple[Record, list[str]]:
    """The run gone on with, and the steps that were kept."""
    half = read(Archive(killed))
    assert not half.complete
    kept = []
    record = run(asked(*pair), Archive(killed), lambda step, old: kept.append(step) if old else None)
    assert {step: record.outcomes[step] for step in kept} == {step: half.outcomes[step] for step in kept}
    return record, kept


def test_a_killed_run_goes_on_where_it_stopped(resumed: tuple[Record, list[str]]) -> None:
    record, kept = resumed
    order = list(STEPS)
    done = order[: order.index(HELD_AT)]
    failed = [step for step in done if record.outcomes[step].status == "fail"]
    assert kept == (done if not failed else done[: done.index(failed[0])])
    assert list(record.outcomes) == order


def test_the_steps_find_what_is_there(resumed: tuple[Record, list[str]]) -> None:
    outcomes = resumed[0].outcomes
    for step in STEPS:
        assert outcomes[step].status in ("pass", "warn"), (step, outcomes[step])
    assert outcomes["accept"].facts["outcome"] == "identical"
    assert outcomes["cache"].facts["bytes_per_token"] == 2 * (16 + 8) * 4
    assert outcomes["monitor"].facts["acceptance_length"] > 1


def test_both_reports_hold_every_step(resumed: tuple[Record, list[str]]) -> None:
    record = resumed[0]
    for text in (markdown(record, "zh"), page(record).html()):
        for step, outcome in record.outcomes.items():
            assert step in text
            assert outcome.facts.keys() == {name for name in outcome.facts if name in text}


def test_an_archive_is_of_one_draft_and_one_set_of_settings(
    pair: tuple[Path, Path], resumed: tuple[Record, list[str]], killed: Path
) -> None:
    with pytest.raises(BadInput, match="seed changed"):
        run(replace(asked(*pair), seed=1), Archive(killed))


def test_diff_shows_the_changed_field_and_what_it_affects(
    pair: tuple[Path, Path], resumed: tuple[Record, list[str]], killed: Path, tmp_path: Path
) -> None:
    target, draft = pair
    changed = copy(draft, tmp_path / "draft")
    change_config(changed, block_causal=True)
    other = run(asked(target, changed), Archive(tmp_path / "other"))
    found = differences(resumed[0], other)
    (cause,) = found.causes
    assert (cause.fact, cause.left, cause.right) == ("config.block_causal", None, True)
    assert cause.affects
    affected = {(effect.step, effect.fact) for effect in found.effects}
    assert {("map", "acceptance_length"), ("confidence", "acceptance_length")} <= affected
    assert ("accept", "outcome") not in affected

    done = CliRunner().invoke(app, ["runbook", "diff", str(killed), str(tmp_path / "other"), "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["causes"][0]["fact"] == "config.block_causal"


def test_a_run_does_not_differ_from_itself(resumed: tuple[Record, list[str]], killed: Path) -> None:
    assert differences(resumed[0], read(Archive(killed))).same
    done = CliRunner().invoke(app, ["runbook", "diff", str(killed), str(killed)])
    assert done.exit_code == 0, done.output


def test_a_pair_that_cannot_load_fails_step_by_step(pair: tuple[Path, Path], tmp_path: Path) -> None:
    broken = copy(pair[1], tmp_path / "draft")
    (broken / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    arguments = ["runbook", "run", tmp_path / "archive", "--target", pair[0], "--draft", broken, "--json"]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 1, done.output
    steps = {step["step"]: step for step in json.loads(done.stdout)["steps"]}
    assert {name for name, step in steps.items() if step["status"] == "fail"} >= {"inspect", "load", "accept"}
    assert (tmp_path / "archive" / "report.html").is_file()


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no archive"):
        read(Archive(tmp_path))
