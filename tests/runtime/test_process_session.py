"""Sessions of processes: results of threads, from scripts and coroutines; large tensors; state; errors of calls."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from handmade import RAISES_ON_1, SUM_COLUMNS, example_input, expected_outputs, mlp_bundle

import distir_relax as dr
from distir_relax.bundle import Bundle, write_bundle
from distir_relax.errors import BundleError, DistIRError, RunError
from distir_relax.runtime.session import Session, SessionClosed
from tests.imported_once import compile_language_model
from tests.runtime.counting import Counting

pytestmark = [
    pytest.mark.mpirun, pytest.mark.timeout(90), pytest.mark.usefixtures("quick_launches"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]  # fmt: skip
VOCABULARY, LENGTH = 61, 64


@cache
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=3, n_embd=24, vocab_size=VOCABULARY, n_positions=LENGTH)
    return transformers.GPT2LMHeadModel(config).eval()


@cache
def generation(strategy: str) -> dr.Generation:
    return compile_language_model(model(), strategy=strategy, tail="pad", max_batch=4)


def prompts(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Any]:
    """Save a bundle, launch it, and close it after the test."""
    sessions: list[dr.ProcessSession] = []

    def launch(source: Any, **options: Any) -> dr.ProcessSession:
        path = tmp_path / f"{len(sessions)}.dist"
        if isinstance(source, dr.Plan):
            source.save(path, ("torch",))
        else:
            write_bundle(source, path)
        # Programs that are written for a test stand for what a rank's program may do.
        written = isinstance(source, Bundle)
        sessions.append(dr.launch(path, **{"timeout": 20, "trust_code": written, **options}))
        return sessions[-1]

    yield launch
    for session in sessions:
        session.close()
        assert all(not process.is_running() for process in session._processes.processes)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("strategy", "ranks", "launcher"),
    [("1/1/2/1", 2, None), ("1/3/1/1", 3, "torchrun"), ("1/5/1/1", 5, "mpirun")],
)
def test_tokens_and_logits_are_those_of_threads(saved: Any, strategy: str, ranks: int, launcher: str | None) -> None:
    threads = generation(strategy)
    session = saved(threads.plan, ranks=ranks, launcher=launcher)
    for batch, length, count in ((3, 7, 9), (2, 3, 5)):
        ids = prompts(batch, length)
        assert torch.equal(session.generate(ids, count), threads.generate(ids, count))
    options: Any = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 7, "stop": [5]}
    one = prompts(1, 6)[0]
    expected = threads.generate(one, 8, **options)
    assert torch.equal(session.generate(one, 8, **options), expected)
    assert [*session.stream(one.tolist(), 8, **options)] == expected.tolist()
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": 0.1, "no_repeat_ngram_size": 2}
    expected = threads.generate(ids, 9, **penalties)
    assert torch.equal(session.generate(ids, 9, **penalties), expected)
    assert not torch.equal(threads.generate(ids, 9), expected)
    logits = session(ids)
    torch.testing.assert_close(logits, threads.plan(ids, use_cache=False).logits)
    # A sequence in two calls, by names.
    first = session.run({"input_ids": ids[:, :2]})
    torch.testing.assert_close(session.run({"input_ids": ids[:, 2:]}, past=2)["logits"], logits)
    assert first["logits"].shape == (2, 1, VOCABULARY)
    assert f"{session._processes.launcher}, {ranks} processes>" in repr(session)


def test_coroutines_share_a_session(saved: Any) -> None:
    threads = generation("1/2/1/1")
    session = saved(threads.plan)
    expected = {n: threads.generate(prompts(1, n)[0], 12) for n in (3, 5, 8)}
    order: list[str] = []

    async def stream(n: int) -> list[int]:
        tokens = []
        async for token in session.stream_async(prompts(1, n)[0], 12):
            order.append("token")
            tokens.append(token)
        return tokens

    async def tick() -> None:
        while True:
            order.append("tick")
            await asyncio.sleep(0.001)

    async def together() -> None:
        ticks = asyncio.create_task(tick())
        found = await asyncio.gather(
            stream(3), session.generate_async(prompts(1, 5)[0], 12), stream(8), session.call_async(prompts(2, 4))
        )
        ticks.cancel()
        assert [found[0], found[1].tolist(), found[2]] == [expected[n].tolist() for n in (3, 5, 8)]
        torch.testing.assert_close(found[3], threads.plan(prompts(2, 4), use_cache=False).logits)
        # Cancelled in the middle of a stream, and while it waits for its turn.
        tasks = [asyncio.create_task(stream(3)), asyncio.create_task(stream(5))]
        while order[-1] != "token":
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (await stream(8)) == expected[8].tolist()
        async for _ in session.stream_async([3], 5):
            with pytest.raises(RunError, match="in use by a stream or call that is not finished, of the same caller"):
                await session.call_async(prompts(1, 1))

    asyncio.run(together())
    # The loop runs while tokens are made.
    assert "tick" in order[order.index("token") : -1]


def test_threads_take_turns_and_a_stream_has_its_own(saved: Any) -> None:
    session = saved(mlp_bundle([2, 0, 1]))
    wrong: list[int] = []

    def caller(seed: int) -> None:
        for turn in range(10):
            x = np.random.default_rng(100 * seed + turn).standard_normal((4, 6)).astype("float32")
            if not np.allclose(session(x)["z"], expected_outputs(session.bundle, x)["z"], rtol=1e-5, atol=1e-5):
                wrong.append(seed)

    callers = [threading.Thread(target=caller, args=(seed,), daemon=True) for seed in range(3)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(30)
        assert not thread.is_alive()
    assert wrong == []
    with pytest.raises(RunError, match="the program does not continue sequences of tokens"):
        session.generate([1])


def test_large_tensors_are_shared_and_results_are_the_callers(saved: Any) -> None:
    rows = 9001
    session = saved(mlp_bundle([3, 2], rows=rows))
    x = example_input(rows)
    expected = expected_outputs(session.bundle, x)
    first = session(torch.from_numpy(x))
    for name, value in expected.items():
        np.testing.assert_allclose(first[name].numpy(), value, rtol=1e-4, atol=1e-4)
    kept = first["z"].clone()
    # The segments are used again; a view of another layout is copied.
    second = session(torch.from_numpy(-x).T.contiguous().T)
    assert torch.equal(first["z"], kept)
    first["z"].zero_()
    np.testing.assert_allclose(second["z"].numpy(), expected_outputs(session.bundle, -x)["z"], rtol=1e-4, atol=1e-4)
    assert [*session.run({"x": x}, outputs=["z"])] == ["z"]
    assert session.seconds > 0


def test_state_stays_on_the_ranks(saved: Any) -> None:
    model, x = Counting(), torch.randn(3, 7)
    session = saved(dr.compile(model, (x,)))
    for _ in range(2):
        torch.testing.assert_close(session(x), model(x))
    (name,) = session.state()
    torch.testing.assert_close(session.state()[name], model.count)
    session.load_state({name: torch.full((7,), 10.0)})
    model.count.fill_(10)
    torch.testing.assert_close(session(x), model(x))
    with pytest.raises(RunError, match="the state is missing"):
        session.load_state({})


def test_an_error_of_all_ranks_leaves_the_session_usable(saved: Any) -> None:
    threads = generation("1/3/1/1")
    session = saved(threads.plan)
    for prompt, options, message in (
        ([1, VOCABULARY], {"max_new_tokens": 3}, "expected token ids from 0 to 60, found 61"),
        ([], {}, "expected a prompt of at least one token, found none"),
        ([1] * 60, {"max_new_tokens": 7}, "expected at most 64 tokens, found a prompt of 60 and 7 new ones"),
        ([[1]] * 5, {"max_new_tokens": 3}, "expected batch of at least 1 and at most 4, found 5"),
        ([1], {"max_new_tokens": 3, "temperature": -1.0}, "expected a temperature of at least 0, found -1.0"),
    ):
        with pytest.raises(DistIRError, match=message):
            session.generate(prompt, **options)
        with pytest.raises(DistIRError, match=message):
            threads.generate(prompt, **options)
    with pytest.raises(DistIRError, match=f"index {VOCABULARY}"):
        session.run({"input_ids": torch.tensor([[1, VOCABULARY]])})
    with pytest.raises(RunError, match="expected to continue the sequence of the last call"):
        session.run({"input_ids": prompts(1, 2)}, past=9)
    with pytest.raises(RunError, match=r"input 'input_ids': expected int64 .* found float32"):
        session(torch.ones(1, 2))
    with pytest.raises(RunError, match="the program has no such output"):
        session.run({"input_ids": prompts(1, 2)}, outputs=["loss"])
    assert torch.equal(session.generate([3, 4], 4), threads.generate([3, 4], 4))


def test_an_error_of_one_rank_closes_the_session(saved: Any) -> None:
    session = saved(mlp_bundle([2, 1, 2], RAISES_ON_1))
    with pytest.raises(ValueError, match="a kernel failed") as caught:
        session(example_input())
    assert caught.value.__notes__[-1] == "raised on rank 1 of 3"
    assert "main_0.py" in caught.value.__notes__[0]
    with pytest.raises(SessionClosed, match="this session is closed: a kernel failed"):
        session(example_input())
    assert "closed: a kernel failed" in repr(session)


def test_the_users_message_and_place(saved: Any) -> None:
    text = SUM_COLUMNS.replace(
        "    z =", "    from distir_relax.errors import ProfileError\n"
        "    raise ProfileError('expected 3', 'model.py:8', 'do it')\n    z ="
    )  # fmt: skip
    session = saved(mlp_bundle([1, 2], text))
    for _ in range(2):
        with pytest.raises(DistIRError, match="expected 3") as caught:
            session(example_input())
        error = caught.value
        assert (type(error).__name__, error.where, error.hint) == ("ProfileError", "model.py:8", "do it")


def test_misuse(saved: Any, tmp_path: Path) -> None:
    threads = generation("1/2/1/1")
    session = saved(threads.plan)
    stream = session.stream([3, 4], 5)
    assert next(stream) == threads.generate([3, 4], 1)[0]
    with pytest.raises(RunError, match="in use by a stream or call that is not finished, of the same caller"):
        session(prompts(1, 2))
    stream.close()
    session(prompts(1, 2))
    child = os.fork()
    if child == 0:
        try:
            session(prompts(1, 2))
        except RunError as error:
            os._exit(17 if "belongs to process" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    session(prompts(1, 2))
    session.close()
    session.close()
    with pytest.raises(SessionClosed, match=r"this session is closed: close\(\) was called"):
        session(prompts(1, 2))
    path = tmp_path / "0.dist"
    for arguments, options, message in (
        ((path,), {"ranks": 3}, "expected 2 ranks for the mesh .*, found 3"),
        ((path,), {"launcher": "srun"}, "expected the launcher 'mpirun' or 'torchrun', found 'srun'"),
        ((path,), {"backend": "cuda"}, "unknown backend 'cuda'"),
        ((path,), {"device": "tpu"}, "unknown device 'tpu'"),
        ((threads.plan,), {}, "expected the path of a bundle, found"),
    ):
        with pytest.raises(RunError, match=message):
            dr.launch(*arguments, **options)
    with pytest.raises(BundleError, match="there is no such bundle"):
        dr.launch(tmp_path / "none.dist")
    weights = path / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(BundleError, match="the weights are damaged"):
        dr.launch(path)


def test_a_garbage_session_ends_its_ranks(tmp_path: Path) -> None:
    write_bundle(mlp_bundle([2, 1]), tmp_path / "m.dist")
    session = dr.launch(tmp_path / "m.dist")
    processes, launch = session._processes.processes, session._processes.launch
    assert np.allclose(session(example_input())["z"], Session(session.bundle)({"x": example_input()})["z"])
    del session
    assert launch.poll() is not None
    assert not any(process.is_running() for process in processes)
