"""`k3dspark generate` on a small random pair: what it prints, what it refuses, and its exit status."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from k3dspark.cli.generate import _visible
from k3dspark.cli.main import app
from k3dspark.decoding import compare as comparing
from k3dspark.embedded.pair import load_pair
from tiny_models import POSITIONS, write_draft, write_pair, write_target

PROMPT = "Why does ice float?"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return write_pair(root)


@pytest.fixture(scope="module")
def pair(models: tuple[Path, Path]) -> list[str]:
    """The options that name the small pair."""
    return ["--target", str(models[0]), "--draft", str(models[1]), "--dtype", "float32"]


def generate(*arguments: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(app, ["generate", *arguments], input=stdin)


def as_json(*arguments: str, stdin: bytes | None = None) -> dict[str, Any]:
    done = generate("--json", *arguments, stdin=stdin)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_json_holds_the_documented_fields(pair: list[str]) -> None:
    answer = as_json(*pair, "--compare", "-n", "24", PROMPT)
    assert list(answer) == [
        "text", "token_ids", "finish_reason", "prompt_tokens", "new_tokens", "rounds", "acceptance_length",
        "acceptance_rate", "per_slot_acceptance", "tokens_per_second", "plain", "speedup", "identical", "logprobs",
        "seed", "verify", "schedule", "calibrated", "exact",
    ]  # fmt: skip
    assert list(answer["plain"]) == ["token_ids", "tokens_per_second"]
    assert answer["new_tokens"] == len(answer["token_ids"])
    assert len(answer["per_slot_acceptance"]) == 7
    assert answer["acceptance_length"] - 1 == pytest.approx(sum(answer["per_slot_acceptance"]))
    assert answer["speedup"] == pytest.approx(answer["tokens_per_second"] / answer["plain"]["tokens_per_second"])


def test_compared_decodings_are_identical(pair: list[str]) -> None:
    answer = as_json(*pair, "--compare", "-n", "40", PROMPT)
    assert answer["identical"] is True
    assert answer["token_ids"] == answer["plain"]["token_ids"]


def test_without_compare_there_is_nothing_to_compare_with(pair: list[str]) -> None:
    answer = as_json(*pair, "-n", "8", PROMPT)
    assert (answer["plain"], answer["speedup"], answer["identical"]) == (None, None, None)


def test_plain_decoding_gives_the_same_tokens_and_drafts_none(models: tuple[Path, Path], pair: list[str]) -> None:
    plain = as_json("--target", str(models[0]), "--no-draft", "--dtype", "float32", "-n", "24", PROMPT)
    assert plain["token_ids"] == as_json(*pair, "-n", "24", PROMPT)["token_ids"]
    assert (plain["acceptance_length"], plain["acceptance_rate"], plain["per_slot_acceptance"]) == (1.0, 0.0, [])


def test_the_text_goes_to_standard_output_and_the_figures_to_standard_error(pair: list[str]) -> None:
    done = generate(*pair, "-n", "24", PROMPT)
    assert done.stdout == as_json(*pair, "-n", "24", PROMPT)["text"] + "\n"
    assert "tokens/s, acceptance length" in done.stderr


def test_control_characters_of_the_answer_are_shown_not_obeyed_on_a_terminal() -> None:
    text = "a\x1b[2Jb\r\x9bc\td\ne　👩\u200d🚀"
    assert _visible(text) == "a\\x1b[2Jb\\r\\x9bc\td\ne　👩\u200d🚀"


def test_a_comparison_ends_with_the_table_and_its_verdict(pair: list[str]) -> None:
    done = generate(*pair, "--compare", "-n", "24", PROMPT)
    assert done.exit_code == 0
    assert done.stdout.startswith(as_json(*pair, "-n", "24", PROMPT)["text"] + "\n")
    for row in ("tokens/s", "speed-up", "acceptance length", "accepted at slot 1", "accepted at slot 7"):
        assert row in done.stdout
    assert done.stdout.splitlines()[-1] == "identical: yes"


def test_different_decodings_are_a_failed_check(pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = comparing.compare

    def spoiled(*arguments: Any) -> comparing.Comparison:
        comparison = real(*arguments)
        plain = comparison.plain
        return replace(comparison, plain=replace(plain, token_ids=(*plain.token_ids[:3], 0, *plain.token_ids[4:])))

    monkeypatch.setattr(comparing, "compare", spoiled)
    done = generate(*pair, "--compare", "-n", "8", PROMPT)
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1] == "identical: no"
    assert "differ from new token 3 on" in done.stderr
    assert json.loads(generate(*pair, "--compare", "--json", "-n", "8", PROMPT).stdout)["identical"] is False


SAMPLED = ["--temperature", "1", "--top-p", "0.95"]


def test_a_seed_repeats_a_sampled_answer_and_is_reported_when_it_was_drawn(pair: list[str]) -> None:
    first = as_json(*pair, *SAMPLED, "-n", "24", PROMPT)
    again = as_json(*pair, *SAMPLED, "--seed", str(first["seed"]), "-n", "24", PROMPT)
    assert again["token_ids"] == first["token_ids"]
    assert (again["verify"], again["schedule"]) == ("block", "full")
    other = as_json(*pair, *SAMPLED, "--seed", str(first["seed"] ^ 1), "-n", "24", PROMPT)
    assert other["token_ids"] != first["token_ids"]


def test_every_seed_that_may_be_drawn_can_be_given_back(pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.randbits", lambda bits: 2**bits - 1)
    first = as_json(*pair, *SAMPLED, "-n", "8", PROMPT)
    assert as_json(*pair, *SAMPLED, "--seed", str(first["seed"]), "-n", "8", PROMPT)["token_ids"] == first["token_ids"]


def test_the_largest_seed_is_taken_and_the_next_refused(pair: list[str]) -> None:
    assert as_json(*pair, *SAMPLED, "--seed", str(2**64 - 1), "-n", "2", PROMPT)["seed"] == 2**64 - 1
    assert generate(*pair, *SAMPLED, "--seed", str(2**64), "-n", "2", PROMPT).exit_code == 2


def test_sampled_decodings_are_compared_in_speed_only(pair: list[str]) -> None:
    done = generate(*pair, *SAMPLED, "--seed", "3", "--compare", "-n", "40", PROMPT)
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == "sampled: draws from one distribution, whose tokens need not be equal"
    answer = as_json(*pair, *SAMPLED, "--seed", "3", "--compare", "-n", "40", PROMPT)
    assert answer["identical"] is None
    assert answer["token_ids"] != answer["plain"]["token_ids"]
    assert answer["speedup"] > 0


SCHEDULES: list[list[str]] = [
    ["--draft-length", "2"],
    ["--schedule", "full"],
    ["--schedule", "threshold", "--threshold", "0.2"],
    ["--schedule", "threshold", "--online-calibration"],
    ["--schedule", "cost"],
]


@pytest.mark.parametrize("options", SCHEDULES, ids=" ".join)
@pytest.mark.parametrize("verify", ["greedy", "token", "block"])
def test_no_schedule_and_no_verifier_changes_a_greedy_answer(pair: list[str], verify: str, options: list[str]) -> None:
    exact = [] if "--online-calibration" in options else ["--exact"]
    answer = as_json(*pair, *exact, *options, "--verify", verify, "--compare", "-n", "30", PROMPT)
    assert answer["identical"] is True
    assert (answer["verify"], answer["seed"]) == ("greedy", None)
    assert answer["calibrated"] is (False if {"threshold", "cost"} & set(options) else None)


def test_a_fixed_length_drafts_no_more_than_it_says(pair: list[str]) -> None:
    answer = as_json(*pair, "--draft-length", "2", "-n", "30", PROMPT)
    assert answer["schedule"] == "fixed"
    assert answer["per_slot_acceptance"][2:] == [0.0] * 5


def test_costs_are_measured_once_and_then_read_from_the_file(pair: list[str], tmp_path: Path) -> None:
    file = tmp_path / "new" / "costs.json"
    options = ["--schedule", "cost", "--costs", str(file), "-n", "8", PROMPT]
    as_json(*pair, *options)
    measured = json.loads(file.read_text())
    assert [rows for rows, _ in measured["verify"]] == list(range(1, 9))
    as_json(*pair, *options)
    assert json.loads(file.read_text()) == measured
    file.write_text("{}")
    assert "these are no step costs" in generate(*pair, *options).stderr


def test_stop_text_bias_and_log_probabilities_reach_the_engine(pair: list[str]) -> None:
    free = as_json(*pair, "-n", "24", PROMPT)
    first = free["token_ids"][0]
    barred = as_json(*pair, "--logit-bias", f"{first}:-1000", "-n", "24", "--logprobs", "2", PROMPT)
    assert first not in barred["token_ids"]
    assert len(barred["logprobs"]) == barred["new_tokens"]
    assert [len(entry["best"]) for entry in barred["logprobs"]] == [2] * barred["new_tokens"]
    text = next(c for c in free["text"] if c.isascii() and c.isprintable())
    stopped = as_json(*pair, "--stop", text, "-n", "24", PROMPT)
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == free["text"][: free["text"].index(text) + 1]


def test_a_penalty_keeps_tokens_from_coming_back(pair: list[str]) -> None:
    answer = as_json(*pair, "--presence-penalty", "1000", "--compare", "-n", "30", PROMPT)
    assert answer["identical"] is True
    assert len(set(answer["token_ids"])) == answer["new_tokens"] > 1


def test_the_prompt_is_the_same_from_every_source(pair: list[str], tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbf" + "多少？ how many?\r\n".encode())
    answers = [
        as_json(*pair, "-n", "4", "多少？ how many?"),
        as_json(*pair, "-n", "4", "--prompt", "多少？ how many?"),
        as_json(*pair, "-n", "4", "--prompt-file", str(file)),
        as_json(*pair, "-n", "4", "-", stdin="多少？ how many?\n".encode()),
        as_json(*pair, "-n", "4", "--prompt-file", "-", stdin="多少？ how many?".encode()),
    ]
    assert len({(tuple(a["token_ids"]), a["prompt_tokens"]) for a in answers}) == 1


def test_raw_text_is_continued_without_the_template(models: tuple[Path, Path], pair: list[str]) -> None:
    raw, chat = as_json(*pair, "--raw", "-n", "4", "abc"), as_json(*pair, "-n", "4", "abc")
    assert raw["prompt_tokens"] == 3
    assert chat["prompt_tokens"] == len(load_pair(*models).chat_ids("abc")) > 3


def test_a_system_message_stands_before_the_prompt(models: tuple[Path, Path]) -> None:
    loaded = load_pair(models[0], None)
    text = loaded.tokenizer.decode(loaded.chat_ids("hello", system="be brief"))
    assert text == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_decoding_stops_at_the_end_of_the_window(pair: list[str]) -> None:
    answer = as_json(*pair, "--raw", "-n", "1000", "a" * (POSITIONS - 20))
    assert answer["new_tokens"] <= 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompt"),
        (["one", "--prompt", "two"], "more than one prompt"),
        (["  \n"], "the prompt is empty"),
        (["--prompt-file", "no/such/file"], "cannot read no/such/file: No such file"),
        (["--prompt-file", "."], "cannot read .: Is a directory"),
        (["x", "--compare", "--no-draft"], "nothing to compare"),
        (["x", "--raw", "--system", "y"], "part of the chat template"),
        (["x", "-n", "0"], "max-new-tokens"),
        (["x", "-n", "-3"], "max-new-tokens"),
        (["x", "-n", "many"], "max-new-tokens"),
        (["x", "--threads", "0"], "threads"),
        (["x", "--verify", "greedy", "--temperature", "1"], "--verify greedy with --temperature 1"),
        (["x", "--top-p", "0.9"], "--top-p without a temperature"),
        (["x", "--top-k", "5", "--min-p", "0.1"], "--top-k and --min-p without a temperature"),
        (["x", "--temperature", "-1"], "temperature is -1.0"),
        (["x", "--temperature", "1", "--top-p", "1.5"], "top_p is 1.5"),
        (["x", "--seed", "-1"], "seed is -1"),
        (["x", "--draft-length", "3", "--schedule", "cost"], "--draft-length 3 with --schedule cost"),
        (["x", "--threshold", "0.2"], "--threshold 0.2 without --schedule threshold"),
        (["x", "--online-calibration"], "online calibration with the full schedule"),
        (["x", "--costs", "c.json"], "--costs c.json without --schedule cost"),
        (["x", "--no-draft", "--schedule", "cost"], "--schedule cost with --no-draft"),
        (["x", "--no-draft", "--verify", "block"], "--verify block with --no-draft"),
        (["x", "--logit-bias", "5"], "--logit-bias 5"),
        (["x", "--logprobs", "2"], "--logprobs without --json"),
        (["x", "--dtype", "fp7"], "dtype"),
        (["x", "--target", "no/such/model", "--no-draft"], "no/such/model"),
        (["x", "--target", "."], "embedded draft fits the embedded target only"),
    ],
)
def test_bad_usage_is_refused_with_status_2(arguments: list[str], message: str) -> None:
    done = generate(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in " ".join(done.stderr.replace("\n  why", "").replace("│", "").split())


def test_a_length_beyond_the_block_is_refused(pair: list[str]) -> None:
    done = generate(*pair, "--draft-length", "8", PROMPT)
    assert done.exit_code == 2
    assert "proposes 7 tokens at a time" in done.stderr


def test_online_calibration_is_refused_in_exact_decoding(pair: list[str]) -> None:
    done = generate(*pair, "--schedule", "threshold", "--online-calibration", "--exact", PROMPT)
    assert done.exit_code == 2
    assert "online calibration with exact decoding" in done.stderr


def test_a_prompt_that_is_not_utf8_is_refused(pair: list[str], tmp_path: Path) -> None:
    file = tmp_path / "latin1.txt"
    file.write_bytes("café".encode("latin-1"))
    for done in (generate(*pair, "--prompt-file", str(file)), generate(*pair, "-", stdin=file.read_bytes())):
        assert done.exit_code == 2
        assert "is not UTF-8" in done.stderr
        assert "byte 3 is 0xe9" in done.stderr


def test_a_prompt_longer_than_the_context_is_refused(pair: list[str]) -> None:
    done = generate(*pair, "--raw", "a" * (POSITIONS + 1))
    assert done.exit_code == 2
    assert f"{POSITIONS + 1} tokens" in done.stderr


def test_a_model_without_a_chat_template_asks_for_raw(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", chat_template=None)
    done = generate("--target", str(target), "--no-draft", "-n", "4", "hello")
    assert done.exit_code == 2
    assert "--raw" in done.stderr
    assert generate("--target", str(target), "--no-draft", "-n", "4", "--raw", "hello").exit_code == 0


def test_a_draft_for_another_target_is_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    other = write_draft(tmp_path / "other", target_layer_ids=[0, 7], target_num_hidden_layers=8)
    done = generate("--target", str(models[0]), "--draft", str(other), PROMPT)
    assert (done.exit_code, done.stdout) == (2, "")


@pytest.mark.parametrize("part", ["target", "draft"])
@pytest.mark.parametrize("damage", ["truncated", "foreign", "missing", "no config"])
def test_a_damaged_model_is_refused(tmp_path: Path, part: str, damage: str) -> None:
    write_target(tmp_path / "target")
    write_draft(tmp_path / "draft")
    weights = tmp_path / part / "model.safetensors"
    match damage:
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "foreign":
            weights.write_bytes(b"PK\x03\x04 this is no safetensors file")
        case "missing":
            weights.unlink()
        case "no config":
            (tmp_path / part / "config.json").unlink()
    done = generate("--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), PROMPT)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "model.safetensors" in done.stderr or "config.json" in done.stderr or part in done.stderr
    assert "\n   do: " in done.stderr


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "target" / name).unlink()
    done = generate("--target", str(tmp_path / "target"), "--no-draft", PROMPT)
    assert done.exit_code == 2
    assert "the tokenizer in" in done.stderr
