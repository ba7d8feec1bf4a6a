"""What `monitor export` writes: whole, consistent, and with alerts that fire on their scenario and on no other."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from k3dspark.cli.main import app
from k3dspark.errors import BadInput
from k3dspark.monitoring import runbook_en, runbook_zh, yamltext
from k3dspark.monitoring.alerts import alerts
from k3dspark.monitoring.export import ALERT_FILE, RECORDING_FILE, Deployment, files, write
from k3dspark.monitoring.rules import recordings
from monitoring.scenarios import MINUTES, SCENARIOS, Scenario

DEPLOYMENT = Deployment(
    engines=("n1:8000",), npu_exporters=("n1:8082",), dcgm_exporters=("n2:9400",), expected=3.4, plain_step_seconds=0.02
)
# With promtool at hand these run with all other tests, without it they ask for it by `make integration`.
needs_promtool = pytest.mark.integration if shutil.which("promtool") is None else pytest.mark.filterwarnings("default")


def promtool(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(["promtool", *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_alert_has_a_runbook_entry_in_both_languages() -> None:
    names = {alert.name for alert in alerts(DEPLOYMENT)}
    assert runbook_en.ENTRIES.keys() == runbook_zh.ENTRIES.keys() == names
    for name in names:
        assert len(runbook_en.ENTRIES[name].causes) == len(runbook_zh.ENTRIES[name].causes)
    written = files(DEPLOYMENT)
    for name in ("RUNBOOK.md", "RUNBOOK.zh-CN.md"):
        assert re.findall(r"^## (\w+)$", written[name], re.M) == [alert.name for alert in alerts(DEPLOYMENT)]


def test_every_alert_has_a_scenario() -> None:
    assert {scenario.fires for scenario in SCENARIOS} == {alert.name for alert in alerts(DEPLOYMENT)} | {""}


def test_alerts_and_panels_use_only_names_that_are_recorded() -> None:
    recorded = {rule.record for rule in recordings(DEPLOYMENT)}
    written = files(DEPLOYMENT)
    used = set(re.findall(r"(?<![a-z0-9])dspark:[a-z0-9_:]+", written[ALERT_FILE] + written["dspark-dashboard.json"]))
    assert used <= recorded


def test_without_a_plain_step_there_is_no_break_even() -> None:
    text = "".join(files(Deployment(engines=("a:1",))).values())
    assert "BelowBreakEven" not in text
    assert "break_even" not in text


def test_the_expectation_is_the_past_week_unless_it_is_given() -> None:
    assert "[7d] offset 1h" in files(Deployment())[RECORDING_FILE]
    assert "* 0 + 3.4" in files(DEPLOYMENT)[RECORDING_FILE]


def test_the_dashboard_is_one_that_grafana_can_import() -> None:
    board = json.loads(files(DEPLOYMENT)["dspark-dashboard.json"])
    assert board["schemaVersion"] == 39
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) == 10
    places = [panel["gridPos"] for panel in board["panels"]]
    assert len({(place["x"], place["y"]) for place in places}) == len(places)
    assert all(place["x"] + place["w"] <= 24 for place in places)


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.yml").write_text("x")
    with pytest.raises(BadInput, match="not empty"):
        write(tmp_path, DEPLOYMENT)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yml"]


def test_writing_again_replaces_what_was_written(tmp_path: Path) -> None:
    write(tmp_path, Deployment(block=5))
    write(tmp_path, DEPLOYMENT)
    assert "slots:count < 7" in (tmp_path / ALERT_FILE).read_text()


@pytest.mark.parametrize("target", ["http://a:8000", "a:8000/metrics", " "])
def test_a_target_with_a_scheme_is_refused(tmp_path: Path, target: str) -> None:
    with pytest.raises(BadInput, match="scrape target"):
        write(tmp_path / "out", Deployment(engines=(target,)))
    assert not (tmp_path / "out").exists()


def test_the_command_lists_what_it_wrote(tmp_path: Path) -> None:
    out = tmp_path / "rules"
    done = CliRunner().invoke(app, ["monitor", "export", "--out", str(out), "--engine", "a:8000", "--json"])
    assert done.exit_code == 0, done.output
    assert sorted(json.loads(done.stdout)["files"]) == sorted(path.name for path in out.iterdir())


def test_text_with_quotes_and_lines_survives_yaml() -> None:
    yaml = pytest.importorskip("yaml")
    value = {
        "a": 'say "x": #1\tü',
        "b": "two\n  lines",
        "c": [{"d": {}, "e": []}, {"d": [1, True, None]}],
        "f": ["g:1"],
    }
    assert yaml.safe_load(yamltext.dump(value)) == value


@needs_promtool
def test_promtool_accepts_the_configuration_and_every_rule(tmp_path: Path) -> None:
    for deployment in (DEPLOYMENT, Deployment(engines=("a:1",), block=5)):
        write(tmp_path, deployment)
        assert "SUCCESS" in promtool("check", "config", "prometheus.yml", cwd=tmp_path)


@needs_promtool
def test_each_alert_fires_on_its_scenario_and_on_no_other(tmp_path: Path) -> None:
    write(tmp_path, DEPLOYMENT)
    document = {
        "rule_files": [RECORDING_FILE, ALERT_FILE],
        "evaluation_interval": "1m",
        "group_eval_order": ["dspark", "dspark-alerts"],
        "tests": [_as_test(scenario) for scenario in SCENARIOS],
    }
    (tmp_path / "scenarios.test.yml").write_text(yamltext.dump(document))
    assert "SUCCESS" in promtool("test", "rules", "scenarios.test.yml", cwd=tmp_path)


def _as_test(scenario: Scenario) -> dict[str, object]:
    expected = [{"labels": f'{{alertname="{scenario.fires}"}}', "value": 1}] if scenario.fires else []
    return {
        "name": scenario.name,
        "interval": "1m",
        "input_series": [{"series": name, "values": value} for name, value in scenario.series.items()],
        "promql_expr_test": [
            {
                "expr": 'max by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{MINUTES - 2}m",
                "exp_samples": expected,
            }
        ],
    }
