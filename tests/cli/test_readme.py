"""The guides and READMEs name every option, field and status that the command line has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from k3dspark.cli.main import app

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("language", ["", ".zh-CN"])
@pytest.mark.parametrize("name", ["generate", "calibrate", "train", "evaluate"])
def test_every_option_is_in_the_guide(name: str, language: str) -> None:
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    text = (ROOT / "docs" / f"{name}{language}.md").read_text(encoding="utf-8")
    assert {option for option in options if f"`{option}" not in text} == set()


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_readme_names_no_option_that_does_not_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    shown = set(re.findall(r"k3dspark generate ([^\n`]*)", text))
    used = {option for line in shown for option in re.findall(r"(?<!\S)--[a-z-]+", line)}
    help_text = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "200"}).stdout
    assert {option for option in used if option not in help_text} == set()


def test_both_readmes_have_the_same_shape() -> None:
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))
    for mark in ("\n## ", "\n| `", "```"):
        assert english.count(mark) == chinese.count(mark), mark
