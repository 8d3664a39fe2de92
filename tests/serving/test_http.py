"""The HTTP server: OpenAI's client, streams, clients that leave, limits, keys, a rank that fails, and its end."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
import uvicorn
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.bundle import read_bundle
from distir_relax.cli.app import app as commands
from distir_relax.errors import RunError
from distir_relax.runtime.requests import RankRequests, ThreadRequests
from distir_relax.serving import Engine, EngineOptions
from distir_relax.serving.http import EngineService, Replicas, ServerOptions, bound_socket, create_app
from distir_relax.serving.http.app import _event
from distir_relax.serving.http.openai_api import parse_request
from tests.serving import small_model

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.timeout(120)]
PROMPT = "how do I bake bread?"
CHAT: list[Any] = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights on 2 ranks, with a tokenizer and a chat template."""
    return small_model.saved(tmp_path_factory.mktemp("serving"))


@contextmanager
def server(
    path: Path, options: EngineOptions | None = None, count: int = 1, **limits: Any
) -> Iterator[tuple[str, EngineService]]:
    """A server in a thread, at a free port."""
    bundle = read_bundle(path)
    services = [EngineService(lambda: Engine(ThreadRequests(bundle), bundle, options)) for _ in range(count)]
    app = create_app(Replicas(services), bundle, ServerOptions(**limits))
    listener = bound_socket("127.0.0.1", 0)
    config = uvicorn.Config(app, log_config=None, access_log=False)
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", services[0]
    finally:
        running.should_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def running(bundle: Path) -> Iterator[str]:
    with server(bundle) as (address, _):
        yield address


def client(address: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)


def test_the_client_gets_the_text_of_the_model(bundle: Path, running: str) -> None:
    model, api = dr.load(bundle), client(running)
    expected = model.generate(PROMPT, 20)
    whole = api.completions.create(model="x", prompt=PROMPT, max_tokens=20, temperature=0)
    assert whole.choices[0].text == expected
    assert whole.choices[0].finish_reason == "length"
    ids = model.tokenizer.encode(PROMPT)
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(ids), 20)
    stream = api.completions.create(model="x", prompt=ids, max_tokens=20, temperature=0, stream=True)
    pieces = [event.choices[0] for event in stream]
    assert "".join(piece.text for piece in pieces) == expected
    assert [piece.finish_reason for piece in pieces[-2:]] == [None, "length"]
    both = api.completions.create(model="x", prompt=["the", PROMPT], max_tokens=20, temperature=0)
    assert [choice.text for choice in both.choices] == [model.generate("the", 20), expected]
    short = api.completions.create(model="x", prompt=(ids * 512)[:505], temperature=0)
    assert short.usage is not None
    assert (short.usage.completion_tokens, short.choices[0].finish_reason) == (7, "length")
    stop = expected[5:8]
    until = api.completions.create(model="x", prompt=PROMPT, max_tokens=20, temperature=0, stop=stop)
    assert (until.choices[0].text, until.choices[0].finish_reason) == (expected[: expected.index(stop)], "stop")


def test_the_client_chats(bundle: Path, running: str) -> None:
    model, api = dr.load(bundle), client(running)
    expected = model.chat(CHAT, 30)
    whole = api.chat.completions.create(model="x", messages=CHAT, max_tokens=30, temperature=0)
    assert whole.choices[0].message.content == expected
    stream = api.chat.completions.create(
        model="x", messages=CHAT, max_completion_tokens=30, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    events = [*stream]
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(e.choices[0].delta.content or "" for e in events[:-1]) == expected
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens <= 30
    drawn = [
        api.chat.completions.create(model="x", messages=CHAT, max_tokens=20, temperature=0.9, seed=seed)
        for seed in (1, 1, 2)
    ]
    texts = [each.choices[0].message.content for each in drawn]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0] == model.chat(CHAT, 20, temperature=0.9, seed=1)
    assert [m.id for m in api.models.list()] == ["gpt2"]


def test_penalties_and_min_p(bundle: Path, running: str) -> None:
    """Those of OpenAI's client, and vLLM's fields."""
    model, api = dr.load(bundle), client(running)
    penalties: dict[str, Any] = {"frequency_penalty": 0.4, "presence_penalty": -0.3}
    whole = api.completions.create(model="x", prompt=PROMPT, max_tokens=20, temperature=0, **penalties)
    expected = model.generate(PROMPT, 20, **penalties)
    assert whole.choices[0].text == expected != model.generate(PROMPT, 20)
    extra: dict[str, Any] = {"repetition_penalty": 1.3, "min_p": 0.8}
    drawn = api.chat.completions.create(
        model="x", messages=CHAT, max_tokens=20, temperature=0.9, seed=1, extra_body=extra
    )
    expected = model.chat(CHAT, 20, temperature=0.9, seed=1, **extra)
    assert drawn.choices[0].message.content == expected != model.chat(CHAT, 20, temperature=0.9, seed=1)


def test_settings_of_the_model_are_defaults() -> None:
    defaults = {"min_p": 0.1, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3}
    sampling = parse_request({"prompt": "x", "repetition_penalty": 1.5}, False, defaults).sampling
    assert (sampling.min_p, sampling.repetition_penalty, sampling.no_repeat_ngram_size) == (0.1, 1.5, 3)


def test_many_clients_at_once_get_their_own_text(bundle: Path, running: str) -> None:
    model, api = dr.load(bundle), client(running)
    prompts = [f"bread number {n}" for n in range(12)]

    def ask(prompt: str) -> str:
        return api.completions.create(model="x", prompt=prompt, max_tokens=15, temperature=0).choices[0].text

    with ThreadPoolExecutor(12) as pool:
        assert [*pool.map(ask, prompts)] == [model.generate(prompt, 15) for prompt in prompts]
    text = httpx.get(f"{running}/metrics").text
    assert float(re.findall(r'^distir_requests_total{end="length"} (\S+)', text, re.M)[0]) >= 12
    assert 'distir_time_to_first_token_seconds_bucket{le="+Inf"}' in text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "the field 'prompt' is missing"),
        ([], r"expected a table, found \[\]"),
        ({"prompt": 7}, "expected a list for 'prompt', found 7"),
        ({"prompt": []}, "expected text or token ids, of one prompt or several for 'prompt'"),
        ({"prompt": ""}, "expected a prompt of at least one token, found none"),
        ({"prompt": [999]}, "expected token ids from 0 to 310, found 999"),
        ({"prompt": "x", "max_tokens": 0}, "expected a whole number of at least 1 for 'max_tokens', found 0"),
        ({"prompt": "x", "max_tokens": 5000}, "expected at most 512 tokens, found a prompt of"),
        ({"prompt": "x", "temperature": -1}, "expected a temperature of at least 0, found -1"),
        ({"prompt": "x", "temperature": "hot"}, "expected a number for 'temperature', found 'hot'"),
        ({"prompt": "x", "stop": ["", "a"]}, "expected at most 16 texts that are not empty for 'stop'"),
        ({"prompt": "x", "n": 2}, "'n' is not supported, found 2"),
        ({"prompt": "x", "logprobs": 3}, "'logprobs' is not supported, found 3"),
        ({"prompt": "x", "stop_token_ids": [3]}, r"'stop_token_ids' is not supported, found \[3\]"),
        ({"prompt": "x", "repetition_penalty": 0}, "expected a repetition_penalty above 0, found 0"),
        ({"prompt": "x", "frequency_penalty": 2.5}, "expected a frequency_penalty from -2 to 2, found 2.5"),
        ({"prompt": "x", "min_p": "x"}, "expected a number for 'min_p', found 'x'"),
        ({"prompt": "x", "repeat_penalty": 1.2}, "'repeat_penalty' is not supported, found 1.2"),
        ({"prompt": "x", "stream": "yes"}, "expected true or false for 'stream', found 'yes'"),
        ({"prompt": "x", "logprobs": 0}, "'logprobs' is not supported, found 0"),
        ({"prompt": "x", "allowed_token_ids": [1]}, r"'allowed_token_ids' is not supported, found \[1\]"),
        *(
            ({"prompt": "x", name: {}}, f"'{name}' is not supported, found {{}}")
            for name in ("web_search_options", "guided_json", "json_schema", "structured_outputs", "prediction")
        ),
        ({"prompt": "x", "prompt_logprobs": 0}, "'prompt_logprobs' is not supported, found 0"),
        ({"prompt": "x", "reasoning_effort": "low"}, "'reasoning_effort' is not supported, found 'low'"),
        ({"prompt": "x", "chat_template_kwargs": {}}, r"the field 'chat_template_kwargs' is unknown, found {}"),
        ({"prompt": "x", "temprature": 1}, "the field 'temprature' is unknown, found 1"),
        ({"prompt": "x", "seed": 1.5}, "expected a whole number for 'seed', found 1.5"),
        ({"prompt": "x", "top_k": 1.5}, "expected a whole number for 'top_k', found 1.5"),
        ({"prompt": "x", "top_k": -2}, "expected top_k of at least 0, found -2"),
        ({"prompt": "x", "max_tokens": 3, "max_completion_tokens": 4}, "the field 'max_completion_tokens' is unknown"),
        ({"prompt": "x", "model": 7}, "expected text for 'model', found 7"),
        ({"prompt": "x", "stream_options": {"other": 1}}, "the field 'other' is unknown, found 1"),
    ],
)  # fmt: skip
def test_bad_requests_get_one_message(running: str, body: Any, message: str) -> None:
    if body == {"prompt": ""}:
        # The tokenizer begins every text with a token.
        body, message = {"prompt": [[]]}, "expected text or token ids, of one prompt or several"
    answer = httpx.post(f"{running}/v1/completions", json=body)
    assert answer.status_code == 400
    assert re.search(message, answer.json()["error"]["message"])
    assert answer.headers["x-request-id"]


NEUTRAL: dict[str, Any] = {
    "model": None, "best_of": 1, "n": 1, "top_k": -1, "frequency_penalty": 0.0, "logit_bias": {}, "echo": False,
    "tools": [], "tool_choice": "auto", "stop_token_ids": None, "repetition_penalty": 1.0, "user": "me",
    "response_format": {"type": "text"}, "min_p": 0, "skip_special_tokens": True, "seed": None,
}  # fmt: skip


def test_fields_that_change_nothing_are_taken(bundle: Path, running: str) -> None:
    given = {"max_tokens": 5, "temperature": 0}
    plain = httpx.post(f"{running}/v1/completions", json={"prompt": PROMPT, **given}).json()["choices"]
    found = httpx.post(f"{running}/v1/completions", json={"prompt": PROMPT, **given, **NEUTRAL})
    assert found.json()["choices"] == plain
    chat = httpx.post(f"{running}/v1/chat/completions", json={"messages": CHAT, **given}).json()["choices"]
    more = {"logprobs": False, "top_logprobs": 0, "metadata": {"a": "b"}, "modalities": ["text"], "max_tokens": 5}
    messages = [{**CHAT[0], "tool_calls": None, "name": None}]
    body = {"messages": messages, **given, **NEUTRAL, **more, "max_completion_tokens": 5}
    found = httpx.post(f"{running}/v1/chat/completions", json=body)
    assert found.json()["choices"] == chat
    body["max_completion_tokens"] = 6
    refused = httpx.post(f"{running}/v1/chat/completions", json=body)
    assert (refused.status_code, "one number of tokens, found two" in refused.text) == (400, True)
    refused = httpx.post(f"{running}/v1/chat/completions", json={"messages": [{**CHAT[0], "tool_call_id": "7"}]})
    assert (refused.status_code, "the field 'tool_call_id' is unknown" in refused.text) == (400, True)


def test_variables_of_the_chat_template(bundle: Path, running: str) -> None:
    """The template of the tests counts tools, and says what it is told."""
    body = {"messages": CHAT, "max_tokens": 3, "temperature": 0}
    post = f"{running}/v1/chat/completions"
    plain = httpx.post(post, json=body).json()
    told = httpx.post(post, json={**body, "chat_template_kwargs": {"enable_thinking": True}}).json()
    assert told["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
    refused = httpx.post(post, json={**body, "chat_template_kwargs": {"messages": []}})
    assert (refused.status_code, "other variables of the chat template than messages" in refused.text) == (400, True)
    assert httpx.post(post, json={**body, "chat_template_kwargs": 7}).status_code == 400


def test_a_model_by_its_name_and_paths_that_do_not_exist(running: str) -> None:
    assert client(running).models.retrieve("gpt2").id == "gpt2"
    with pytest.raises(openai.NotFoundError, match="the model 'gpt3' does not exist"):
        client(running).models.retrieve("gpt3")
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("PUT", "/", 405)):
        found = httpx.request(method, f"{running}{path}")
        assert found.status_code == status
        assert f"{method} {path}" in found.json()["error"]["message"]


def test_a_list_of_prompts_waits_as_one_request(bundle: Path) -> None:
    options = EngineOptions(max_requests=2)
    with server(bundle, options, max_waiting=2, model_name="other") as (address, _), ThreadPoolExecutor(2) as pool:
        prompts, post = [f"bread number {n}" for n in range(20)], f"{address}/v1/completions"
        body = {"prompt": prompts, "max_tokens": 4, "temperature": 0}
        both = [pool.submit(httpx.post, post, json=body, timeout=60) for _ in range(2)]
        answers = [answer.result().json() for answer in both]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert len(answers[0]["choices"]) == 20
        assert answers[0]["model"] == "other"
        assert [m.id for m in client(address).models.list()] == ["other"]


def test_ends_of_lines_within_text_do_not_end_an_event() -> None:
    text = "a\u2028b\u2029c\u0085d"
    event = _event({"text": text})
    assert len(event.splitlines()) == 2
    assert json.loads(event.removeprefix("data: ")) == {"text": text}


def test_other_bad_requests(running: str) -> None:
    post = f"{running}/v1/chat/completions"
    assert httpx.post(post, content=b"{").json()["error"]["message"] == "expected JSON in the body of the request"
    assert httpx.post(post, content=b"\xff\xfe").status_code == 400
    assert httpx.post(post, content=b"[" * 100_000).status_code == 400
    assert httpx.post(post, content=b" " * (5 << 20)).status_code == 413
    assert httpx.post(post, json={"messages": []}).status_code == 400
    found = httpx.post(post, json={"messages": [{"role": "robot", "content": "x"}]})
    assert (found.status_code, "no such role" in found.text) == (400, True)
    assert httpx.post(post, json={"messages": [{"role": "user", "content": [{"type": "image"}]}]}).status_code == 400
    assert httpx.get(post).status_code == 405
    named = httpx.get(f"{running}/health", headers={"X-Request-Id": "a-1"})
    assert (named.json(), named.headers["x-request-id"]) == ({"status": "ok"}, "a-1")
    status = httpx.get(f"{running}/status").json()
    assert [rank["place"] for rank in status["ranks"]] == ["tensor 1 of 2", "tensor 2 of 2"]
    assert all(0 <= int(rank["idle"].rstrip("%")) <= 100 for rank in status["ranks"])
    page = httpx.get(running)
    assert "text/html" in page.headers["content-type"]


def test_a_client_that_leaves_cancels_its_request(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with server(bundle) as (address, service):
        step = service.engine.step
        # So that no request is done before its client leaves.
        monkeypatch.setattr(service.engine, "step", lambda: (time.sleep(0.005), step())[1])
        body = {"prompt": PROMPT, "max_tokens": 400, "temperature": 0}
        with httpx.stream("POST", f"{address}/v1/completions", json={**body, "stream": True}) as answer:
            lines = answer.iter_lines()  # kept: the stream is closed when it is collected
            next(lines)
            until(lambda: service.engine.running == 1)
        until(lambda: not service.engine.running)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{address}/v1/completions", json=body, timeout=0.05)
        until(lambda: not service.engine.running)
        until(lambda: 'end="cancelled"} 2.0' in httpx.get(f"{address}/metrics").text)
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_limits_of_requests(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of at least 10 ms: neither of two requests for 480 tokens ends within 1.5 s."""
    step = RankRequests.step

    def slow(self: RankRequests, *arguments: Any) -> Any:
        time.sleep(0.01)
        return step(self, *arguments)

    monkeypatch.setattr(RankRequests, "step", slow)
    with server(bundle, EngineOptions(max_requests=1), max_waiting=1, timeout=1.5) as (address, service):
        body = {"prompt": PROMPT, "max_tokens": 480, "temperature": 0}
        post = f"{address}/v1/completions"
        with ThreadPoolExecutor(3) as pool:
            first = pool.submit(httpx.post, post, json=body, timeout=60)
            until(lambda: service.engine.running == 1)
            second = pool.submit(httpx.post, post, json=body, timeout=60)
            until(lambda: service.engine.waiting == 1)
            refused = httpx.post(post, json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert [request.result().status_code for request in (first, second)] == [504, 504]
        assert not service.engine.running


def test_replicas_share_requests(bundle: Path) -> None:
    """Each runs one request at once; a third waits for the one with the fewest."""
    with server(bundle, EngineOptions(max_requests=1), count=2) as (address, first), ThreadPoolExecutor(3) as pool:
        body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0}
        asked = [pool.submit(httpx.post, f"{address}/v1/completions", json=body, timeout=60) for _ in range(3)]
        until(lambda: httpx.get(f"{address}/status").json()["running"] == 2)
        texts = {answer.result().json()["choices"][0]["text"] for answer in asked}
        assert len(texts) == 1
        ended = httpx.get(f"{address}/metrics").text
        assert 'distir_requests_total{end="length"} 3.0' in ended
        assert 0 < first.engine.steps < 180
        places = [rank["place"] for rank in httpx.get(f"{address}/status").json()["ranks"]]
        assert places == [f"replica {replica} of 2, tensor {rank} of 2" for replica in (1, 2) for rank in (1, 2)]


def test_keys_are_required(bundle: Path) -> None:
    with server(bundle, api_keys=("secret", "other")) as (address, _):
        with pytest.raises(openai.AuthenticationError, match="a valid API key is required"):
            client(address, "wrong").models.list()
        assert client(address, "other").models.list().data
        assert httpx.get(f"{address}/v1/models").status_code == 401
        assert httpx.get(f"{address}/health").status_code == 200


def test_a_rank_that_fails_gives_503_and_is_started_again(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, fails = RankRequests.step, threading.Event()

    def failing(self: RankRequests, *arguments: Any) -> Any:
        if fails.is_set() and self._comm.rank == 1:
            fails.clear()
            raise RunError("no memory left")
        return step(self, *arguments)

    monkeypatch.setattr(RankRequests, "step", failing)
    with server(bundle) as (address, service):
        body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0}
        expected = httpx.post(f"{address}/v1/completions", json=body).json()["choices"]
        fails.set()
        broken = httpx.post(f"{address}/v1/completions", json=body, timeout=30)
        assert broken.status_code == 503
        assert "no memory left" in broken.json()["error"]["message"]
        until(lambda: service.is_ready and service.restarts == 1)
        assert httpx.post(f"{address}/v1/completions", json=body).json()["choices"] == expected


@contextmanager
def command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`distir serve` at a free port, which is killed if the test has not ended it."""
    words = [sys.executable, "-m", "distir_relax", "serve", *arguments, "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def address_of(process: subprocess.Popen[str]) -> str:
    """Where the command listens, which it says once its ranks are ready."""
    assert process.stderr is not None
    log = list[str]()
    for line in process.stderr:
        if line.startswith("http://127.0.0.1:"):
            return line.strip()
        log.append(line)
    pytest.fail(f"exit code {process.wait(30)}: {''.join(log)}")


@pytest.mark.mpirun
def test_the_command(bundle: Path) -> None:
    """It says where it listens, takes a request, and ends cleanly while one is open."""
    with command(str(bundle), "--served-model-name", "mine") as process:
        assert process.stderr is not None
        address = address_of(process)
        until(lambda: _is_up(address))
        assert [model["id"] for model in httpx.get(f"{address}/v1/models").json()["data"]] == ["mine"]
        body = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=30) as answer:
            events = answer.iter_lines()
            next(events)
            process.send_signal(signal.SIGTERM)
            rest = [json.loads(line[6:]) for line in events if line.startswith("data: {")]
        assert rest[-1]["choices"][0]["finish_reason"] == "length"
        assert process.wait(30) == 128 + signal.SIGTERM
        log = process.stderr.read()
        assert "Traceback" not in log
        assert "idle while requests ran: rank 0" in log


@pytest.mark.mpirun
def test_a_second_interrupt_ends_the_command_at_once(bundle: Path) -> None:
    with command(str(bundle), "--launcher", "threads") as process:
        assert process.stderr is not None
        address = address_of(process)
        until(lambda: _is_up(address))
        body = {"prompt": PROMPT, "max_tokens": 480, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=30) as answer:
            events = answer.iter_lines()
            next(events)
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 128 + signal.SIGINT
        log = process.stderr.read()
        assert "Traceback" not in log
        assert log.endswith("interrupted (SIGINT)\n")


@pytest.mark.mpirun
def test_the_command_survives_a_killed_rank(bundle: Path) -> None:
    with command(str(bundle), "-n", "2") as process:
        assert process.stderr is not None
        address = address_of(process)
        until(lambda: _is_up(address))
        post, body = f"{address}/v1/completions", {"prompt": PROMPT, "max_tokens": 5, "temperature": 0}
        expected = httpx.post(post, json=body, timeout=30).json()["choices"]
        children = psutil.Process(process.pid).children(recursive=True)
        ranks = [child for child in children if "rank_server" in " ".join(child.cmdline())]
        max(ranks, key=lambda child: child.pid).kill()
        broken = httpx.post(post, json=body, timeout=30)
        assert (broken.status_code, "rank" in broken.json()["error"]["message"]) == (503, True)
        until(lambda: httpx.get(f"{address}/status").json()["restarts"] == 1, 60)
        assert httpx.post(post, json=body, timeout=30).json()["choices"] == expected
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 128 + signal.SIGINT
        assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_the_command_refuses_what_cannot_be_served(bundle: Path, tmp_path: Path) -> None:
    plan = dr.compile(torch.nn.Linear(3, 4), (torch.randn(2, 3),), mesh=1)
    plan.save(tmp_path / "linear.dist", backends=("torch",))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments, message in (
            ([str(bundle), "--port", port], "cannot listen at 127.0.0.1:"),
            ([str(tmp_path / "linear.dist"), "--port", "0"], "the program does not continue sequences"),
            ([str(bundle), "--port", "0", "--memory", "0"], "expected memory for the states of 16 requests"),
            ([str(tmp_path / "none.dist")], "there is no such bundle"),
        ):
            done = CliRunner().invoke(commands, ["serve", *arguments])
            assert message in str(done.exception), done.output


def _is_up(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").status_code == 200
    except httpx.TransportError:
        return False


def until(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def test_the_event_loop_is_not_kept_waiting_by_a_step(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow step delays neither health checks nor other requests' admission."""
    result = ThreadRequests.result

    def slow(self: ThreadRequests) -> Any:
        time.sleep(0.5)
        return result(self)

    monkeypatch.setattr(ThreadRequests, "result", slow)
    with server(bundle) as (address, _):

        async def ask() -> list[float]:
            async with httpx.AsyncClient() as http:
                body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0}
                work = asyncio.create_task(http.post(f"{address}/v1/completions", json=body, timeout=30))
                await asyncio.sleep(0.3)
                start, times = time.perf_counter(), []
                for _ in range(5):
                    await http.get(f"{address}/status")
                    times.append(time.perf_counter() - start)
                assert (await work).status_code == 200
                return times

        assert asyncio.run(ask())[-1] < 0.45
