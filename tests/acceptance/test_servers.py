"""Servers as generators: their dialects, what they refuse, and how their end is told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from acceptance.dialects import NameCodec, listening, speaking
from acceptance.scripted import Scripted
from k3dspark.acceptance.asking import Question, Source
from k3dspark.acceptance.inputs import Input, InputSet
from k3dspark.acceptance.run import Plan, accept
from k3dspark.acceptance.server import Server, open_server
from k3dspark.acceptance.verdict import Outcome
from k3dspark.errors import BadInput, EngineFault

ASKED = Question(token_ids=(1, 2, 3), max_tokens=12, ignore_end=True, salt="s")
CHAT = Question(messages=({"role": "user", "content": "hi"},), max_tokens=12, ignore_end=True)


@contextmanager
def opened(side: Scripted | None = None, *, concurrency: int = 1, **how: Any) -> Iterator[Server]:
    with speaking(side or Scripted(), **how) as url:
        server = open_server(url, model=None, api_key=None, timeout_seconds=60, concurrency=concurrency)
        try:
            yield server
        finally:
            server.close()


@pytest.mark.parametrize("owner", ["vllm", "k3dspark", "sglang"])
@pytest.mark.parametrize("question", [ASKED, CHAT], ids=["ids", "chat"])
def test_a_server_answers_as_what_runs_in_it(owner: str, question: Question) -> None:
    (expected,) = Scripted().ask([question])
    with opened(owner=owner) as server:
        (answer,) = server.ask([question])
    assert server.kind == owner
    assert server.context == 4096
    told = {"prompt_ids": None, "cached": None}
    assert replace(answer, **told) == replace(expected, **told)
    assert answer.source is Source.IDS


def test_fields_that_a_server_refuses_are_left_out_from_then_on() -> None:
    with opened(refuses=("return_token_ids", "cache_salt", "min_p")) as server:
        answers = server.ask([ASKED, ASKED])
    assert server.dropped == {"return_token_ids", "cache_salt", "min_p"}
    assert answers[0].source is Source.LOGPROBS  # names that are numbers are ids
    assert answers[0].token_ids == Scripted().ask([ASKED])[0].token_ids


def test_names_of_tokens_become_ids_by_the_tokenizer() -> None:
    with opened(refuses=("return_token_ids", "return_tokens_as_token_ids")) as server:
        server.tokenizer = NameCodec()
        (answer,) = server.ask([ASKED])
    assert answer.source is Source.LOGPROBS
    assert answer.token_ids == Scripted().ask([ASKED])[0].token_ids


def test_text_is_tokenized_again_only_when_there_is_nothing_else() -> None:
    with opened(ids=False, logprobs=False) as server:
        with pytest.raises(BadInput, match="--tokenizer"):
            server.ask([ASKED])
        server.tokenizer = NameCodec()
        (answer,) = server.ask([ASKED])
    assert answer.source is Source.TEXT
    assert answer.token_ids == Scripted().ask([ASKED])[0].token_ids


def test_a_comparison_by_text_says_so() -> None:
    inputs = InputSet((Input("one", "ids", ASKED),))
    with opened(ids=False, logprobs=False) as one, opened(Scripted(template=(1,)), ids=False, logprobs=False) as other:
        one.tokenizer = other.tokenizer = NameCodec()
        result = accept(one, other, inputs, Plan())
    assert result.verdict.outcome is Outcome.IDENTICAL
    assert result.sources == (Source.TEXT, Source.TEXT)


def test_a_server_lends_its_tokenizer() -> None:
    with opened() as server:
        codec = server.codec()
        assert codec is not None
        assert codec.encode("ab") == list(Scripted().prompt(Question(text="ab")))
    with opened(tokenizes=False) as server:
        assert server.codec() is None


def test_answers_come_in_the_order_of_the_questions_however_many_run() -> None:
    questions = [Question(token_ids=(n, 1), max_tokens=6, ignore_end=True) for n in range(12)]
    with opened(concurrency=4) as server:
        assert [a.token_ids for a in server.ask(questions)] == [a.token_ids for a in Scripted().ask(questions)]


def test_a_server_that_dies_is_a_fault_of_the_engine() -> None:
    with opened(broken_after=1) as server, pytest.raises(EngineFault, match="status 500"):
        server.ask([ASKED, ASKED])
    with pytest.raises(EngineFault, match="does not answer"):
        open_server("http://127.0.0.1:9", model=None, api_key=None, timeout_seconds=5, concurrency=1)


def test_what_is_no_openai_server_is_bad_input() -> None:
    with listening(lambda path, body: (200, {"hello": 1})) as url, pytest.raises(BadInput, match="lists no models"):
        open_server(url, model=None, api_key=None, timeout_seconds=60, concurrency=1)
    with listening(lambda path, body: (401, {})) as url, pytest.raises(BadInput, match="401"):
        open_server(url, model=None, api_key=None, timeout_seconds=60, concurrency=1)


def test_a_model_that_is_not_served_is_bad_input() -> None:
    with speaking(Scripted()) as url, pytest.raises(BadInput, match="does not serve x"):
        open_server(url + "/v1/", model="x", api_key=None, timeout_seconds=60, concurrency=1)


def test_comparing_two_servers_loads_no_torch() -> None:
    program = (
        "import sys\n"
        "from k3dspark.cli.main import main\n"
        "sys.argv = ['k3dspark', 'accept', '--baseline', sys.argv[1], '--candidate', sys.argv[1],"
        " '--lengths', '40', '--per-length', '1', '-n', '8', '--mode', 'both', '--draws', '20', '--json']\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    with speaking(Scripted()) as url:
        done = subprocess.run([sys.executable, "-c", program, url], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert '"outcome": "identical"' in done.stdout
