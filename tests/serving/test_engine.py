"""Many requests at once get the tokens that each would get alone, on any ranks."""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers

import distir_relax as dr
from distir_relax.bundle import read_bundle
from distir_relax.errors import RunError
from distir_relax.runtime.communicator import Communicator
from distir_relax.runtime.generation import Sampling
from distir_relax.runtime.requests import RankRequests, Slot, StateBytes, ThreadRequests, rank_requests
from distir_relax.runtime.requests.page_memory import PAGE, PageMemory
from distir_relax.serving import Engine, EngineOptions, GenerationRequest, start_engine
from distir_relax.serving.drafts import PromptLookup
from tests.imported_once import compile_language_model
from tests.incremental.language_models import VOCABULARY
from tests.incremental.language_models import language_model as model

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.timeout(120), pytest.mark.shares("engine")]
LENGTH = 64
SHARED = "1/1/1/1,context=3,rows=whole"
CASES = [("llama", "1/1/1/1"), ("gpt2", "1/3/1/1"), ("mixtral", "1/1/2/1"), ("llama", SHARED)]
NAMES = ("llama eager", "gemma2 with a window of 5", "falcon with alibi")


@cache
def compiled(name: str = "llama", strategy: str = "1/1/1/1", tail: str = "ragged") -> dr.Generation:
    return compile_language_model(model(name), strategy=strategy, tail=tail, max_length=LENGTH)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30))] for _ in range(count)]


def alone(name: str, prompt: list[int], count: int) -> list[int]:
    """The tokens that the model itself takes, each from the whole sequence."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(name)(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("name", "strategy", "tail"),
    [
        *((name, "1/1/1/1", "ragged") for name in NAMES),
        ("llama", "1/3/1/1", "ragged"), ("gpt2", "1/5/1/1", "pad"), ("gpt2", "1/2/2/1", "ragged"),
        ("mixtral", "1/3/1/1", "pad"), ("gpt2", "2/1/1/1", "ragged"), *((name, SHARED, "ragged") for name in NAMES),
        ("gpt2", "1/2/2/1,context=2,rows=whole", "ragged"), ("llama", "1/1/1/1,context=7,rows=whole", "ragged"),
    ],
)  # fmt: skip
def test_steps_of_several_requests_give_the_logits_of_each(name: str, strategy: str, tail: str) -> None:
    """Random chunks of five sequences, in random order, with logits of none, one or all positions of a chunk."""
    ranks = ThreadRequests(compiled(name, strategy, tail).plan.bundle())
    rng = random.Random(1)
    # The last is longer than the part of a state that a device has.
    ids = [*prompts(4, seed=3), (prompts(9)[0] * LENGTH)[: LENGTH - 1]]
    with torch.no_grad():
        expected = [model(name)(torch.tensor([x]), use_cache=False).logits[0] for x in ids]
    computed, compared = [0] * len(ids), 0
    while any(done < len(x) for done, x in zip(computed, ids, strict=True)):
        slots, wanted = [], []
        for number in rng.sample(range(len(ids)), len(ids)):
            start, room = computed[number], LENGTH - sum(len(slot.tokens) for slot in slots)
            if (left := min(len(ids[number]) - start, room)) and rng.random() < 0.7:
                count = rng.randint(1, min(left, 9))
                last = rng.choice([0, 1, count])
                slots.append(Slot(number, start, ids[number][start : start + count], last, len(ids[number])))
                computed[number] += count
                wanted.append(expected[number][computed[number] - last : computed[number]])
        if slots:
            logits = ranks.logits(slots)
            torch.testing.assert_close(logits, torch.cat(wanted), rtol=1e-5, atol=1e-6)
            compared += len(logits)
    ranks.close()
    assert compared > 10


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("mixtral", "2/1/1/1,experts=data"), ("llama", "1/1/1/1"), ("mixtral", "1/3/1/1"), ("gpt2", "1/1/2/1"),
        ("llama", SHARED),
    ],
)  # fmt: skip
def test_requests_that_join_and_leave_get_the_tokens_they_would_get_alone(name: str, strategy: str) -> None:
    options = EngineOptions(max_requests=4, step_tokens=20, chunk_tokens=7)
    counts = [5, 1, 17, 3, 9, 12, 2]
    with compiled(name, strategy).engine(options) as engine:
        requests = []
        for prompt, count in zip(prompts(len(counts)), counts, strict=True):
            requests.append(engine.submit(prompt, count))
            engine.step()
        first = [token for token, _ in zip(requests[2], range(3), strict=False)]
        engine.run()
        for request, count in zip(requests, counts, strict=True):
            assert request.tokens == alone(name, list(request.prompt), count)
            assert request.ended == "length"
            assert len(request.times) == count
        assert first == requests[2].tokens[:3]
        assert (engine.running, engine.waiting, engine.reserved_tokens) == (0, 0, 0)
        # Together they take fewer steps than one after the other.
        assert engine.steps < sum(counts)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_request_may_have_all_tokens_of_the_program(drafts: int) -> None:
    lengths = (1, 40, LENGTH - 1)
    with compiled("llama", "1/3/1/1").engine(EngineOptions(drafts=drafts)) as engine:
        asked = [([7, 9] * LENGTH)[:n] for n in lengths]
        requests = [engine.submit(prompt, LENGTH - len(prompt)) for prompt in asked]
        engine.run()
    for prompt, request in zip(asked, requests, strict=True):
        assert request.tokens == alone("llama", prompt, LENGTH - len(prompt))


def test_draws_are_those_of_one_request() -> None:
    generation = compiled()
    sampling = {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "seed": 5}
    with generation.engine() as engine:
        requests = [engine.submit(prompt, 8, Sampling(**sampling)) for prompt in prompts(3)]  # type: ignore[arg-type]
        engine.run()
    for request in requests:
        assert request.tokens == generation.generate(list(request.prompt), 8, **sampling).tolist()  # type: ignore[misc]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("strategy", ["1/3/1/1", "1/1/2/1"])
def test_each_request_has_its_own_penalties(strategy: str, drafts: int) -> None:
    """The prompts begin alike: later requests take over what an earlier one without penalties has computed."""
    generation = compiled("gpt2", strategy)
    begin = prompts(1, seed=4)[0][:1] * 3 + list(range(17))
    settings: list[dict[str, Any]] = [
        {}, {"repetition_penalty": 1.3}, {"presence_penalty": -0.5, "frequency_penalty": -0.05}, {},
        {"temperature": 0.5, "seed": 3, "frequency_penalty": 1.0, "min_p": 0.3}, {"no_repeat_ngram_size": 4},
        {"temperature": 0.4, "seed": 3, "top_k": 30, "presence_penalty": 1.5, "repetition_penalty": 0.8},
    ]  # fmt: skip
    options = EngineOptions(drafts=drafts, chunk_tokens=7, max_requests=4)
    with generation.engine(options) as engine:
        requests = []
        for n, sampling in enumerate(settings):
            requests.append(engine.submit([*begin, n], 30, sampling))
            engine.step()
        engine.run()
        assert engine.shared_tokens > 0
        assert bool(engine.accepted_drafts) == bool(drafts)
    for request, sampling in zip(requests, settings, strict=True):
        assert request.tokens == generation.generate(list(request.prompt), 30, **sampling).tolist()


@pytest.mark.parametrize(("name", "strategy"), [("llama", "1/1/1/1"), ("gpt2", "1/3/1/1")])
def test_drafts_change_no_token(name: str, strategy: str) -> None:
    """A model of random weights soon repeats itself, so many drafts are good, and the others are taken back."""
    sampling = [Sampling(), Sampling(temperature=0.4, seed=3), Sampling()]
    found: list[Any] = []
    for drafts in (0, 3):
        with compiled(name, strategy).engine(EngineOptions(drafts=drafts, chunk_tokens=5)) as engine:
            requests = [engine.submit(p, 30, s) for p, s in zip(prompts(3, seed=2), sampling, strict=True)]
            engine.run()
            found += [[r.tokens for r in requests], engine.accepted_drafts, engine.steps]
            engine.submit(requests[0].prompt, 30).result()
            found[-1] = engine.steps - found[-1]
    expected, none, steps, tokens, accepted, fewer = found
    assert tokens == expected
    assert none == 0 < accepted
    assert fewer < steps


def test_drafts_are_the_tokens_after_the_last_place() -> None:
    lookup = PromptLookup()
    lookup.extend([7, 8, 1, 2, 3, 4, 5, 1, 2, 9, 1, 2])
    assert lookup.propose(3) == [9, 1, 2]
    lookup.extend([3])
    assert lookup.propose(2) == [4, 5]
    lookup.extend([6])
    assert lookup.propose(2) == []
    assert PromptLookup().propose(4) == []


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_prefixes_are_shared_and_change_no_token(name: str, strategy: str) -> None:
    begin = prompts(1, seed=4)[0][:1] * 21 + list(range(17))
    asked = [[*begin, 5, 6], begin[:30], [*begin, 5, 7, 8], begin, [9, *begin]]
    with compiled(name, strategy).engine(EngineOptions(max_requests=2)) as engine:
        first = engine.submit(asked[0], 9)
        engine.step()
        # Of one that runs, then of those that have ended.
        requests = [first, *(engine.submit(prompt, 9) for prompt in asked[1:])]
        engine.run()
        for request, prompt in zip(requests, asked, strict=True):
            assert request.tokens == alone(name, prompt, 9)
        assert engine.shared_tokens == 29 + (len(begin) + 1) + (len(begin) - 1)
        again = engine.submit([*asked[0], *first.tokens, 3, 4], 5)
        assert again.result() == alone(name, list(again.prompt), 5)
        # The last token of the first was never computed.
        assert engine.shared_tokens >= len(asked[0]) + 8


def test_kept_requests_make_room() -> None:
    options = EngineOptions(memory=80 * 256, max_requests=2)
    with compiled().engine(options) as engine:
        for number in range(9):
            prompt = [number] * 30
            assert engine.submit(prompt, 10).result() == alone("llama", prompt, 10)
        assert engine.shared_tokens == 0
        assert engine._scheduler.kept_tokens <= 80
        engine.submit([8] * 30, 2).result()
        assert engine.shared_tokens == 29


def test_a_request_takes_memory_of_the_devices_that_hold_its_positions() -> None:
    """Of 64 positions, three devices hold 22, 21 and 21. Each has room for three times as many of 256 bytes."""
    with compiled("llama", SHARED).engine(EngineOptions(memory=66 * 256, share_prefixes=False)) as engine:
        bytes_of = StateBytes(compiled("llama", SHARED).plan.bundle().manifest)
        for length in range(1, LENGTH + 1):
            mine = [min(length, 22), min(max(length - 22, 0), 21), max(length - 43, 0)]
            found = [bytes_of(rank, length) // 256 for rank in range(3)]
            assert mine == found
        asked = [[n] * 40 for n in range(3)] + [[n] for n in range(3, 6)]
        requests = [engine.submit(prompt, 24) for prompt in asked[:3]] + [engine.submit(p, 10) for p in asked[3:]]
        engine.step()
        # The first device is full.
        assert (engine.running, engine.waiting) == (3, 3)
        engine.run()
        for request in requests:
            assert request.tokens == alone("llama", list(request.prompt), request.count)


def test_pages_are_shared_until_they_are_written_to() -> None:
    memory = PageMemory(5 * PAGE)
    data = torch.frombuffer(memory.buffer(), dtype=torch.uint8).view(5, PAGE)
    data[:3] = 1
    middle = PageMemory(5 * PAGE)
    copy = torch.frombuffer(middle.buffer(), dtype=torch.uint8).view(5, PAGE)
    middle.share(1, memory, 0, 3)
    assert copy[:, 0].tolist() == [0, 1, 1, 1, 0]
    copy[3] = 2
    copy[4] = 3
    assert data[:, 0].tolist() == [1, 1, 1, 0, 0]
    last = PageMemory(3 * PAGE)
    end = torch.frombuffer(last.buffer(), dtype=torch.uint8).view(3, PAGE)
    last.share(0, middle, 2, 3)
    # Of the first memory, although the one in between has changed one page; its own last page.
    assert end[:, 0].tolist() == [1, 1, 3]
    del data, memory, copy, middle
    assert end[:, 5].tolist() == [1, 1, 3]


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_logits_do_not_depend_on_other_requests(name: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[int, list[torch.Tensor]] = {}
    choose = rank_requests.choose_tokens

    def keep(logits: torch.Tensor, slots: Sequence[Slot], histories: Any) -> Any:
        rows = iter(logits)
        for slot in slots:
            found.setdefault(slot.request, []).extend(next(rows) for _ in range(slot.last))
        return choose(logits, slots, histories)

    monkeypatch.setattr(rank_requests, "choose_tokens", keep)
    options = EngineOptions(max_requests=5, chunk_tokens=7, batch_invariant=True)
    asked = prompts(5, seed=6)
    with compiled(name, strategy).engine(options) as engine:
        requests = [engine.submit(prompt, 6) for prompt in asked]
        engine.run()
        for prompt, request in zip(asked, requests, strict=True):
            assert request.tokens == alone(name, prompt, 6)
            again = engine.submit(prompt, 6)
            assert again.result() == request.tokens
            assert torch.equal(torch.stack(found[again.number]), torch.stack(found[request.number]))
        assert len(found[requests[0].number]) == 6


@pytest.mark.sweep
def test_prefixes_are_copied_where_no_more_ranges_can_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distir_relax.runtime.requests.page_memory.MOST_SHARED", 1)
    prompt = [n % VOCABULARY for n in range(700)]
    with large().engine() as engine:
        requests = [engine.submit([*prompt[:690], n], 6) for n in (1, 2)]
        found = []
        for request in requests:
            engine.run()
            found.append(request.tokens)
        again = [engine.submit([*prompt[:690], n], 6).result() for n in (1, 2)]
        assert again == found
        assert engine.shared_tokens >= 2 * 690


def test_a_stop_token_ends_a_request_and_a_cancelled_one_leaves() -> None:
    prompt = prompts(1)[0]
    expected = alone("llama", prompt, 9)
    seen: list[tuple[int, str]] = []

    def on_token(request: GenerationRequest) -> None:
        seen.append((len(request.tokens), request.ended))

    with compiled().engine() as engine:
        request = engine.submit(prompt, 9, stop=[expected[3]], on_token=on_token)
        other = engine.submit(prompt, 9)
        engine.step()
        other.cancel()
        other.cancel()
        first = expected.index(expected[3])
        assert request.result() == expected[: first + 1]
        assert (request.ended, other.ended, len(other.tokens)) == ("stop", "cancelled", 1)
        assert seen[-1] == (first + 1, "stop")
        assert engine.submit(prompt, 0).result() == []
    assert not engine.running


@cache
def large() -> dr.Generation:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=3, n_head=4, n_embd=256, vocab_size=VOCABULARY, n_positions=2048)
    return dr.compile_generation(transformers.GPT2LMHeadModel(config).eval(), max_length=2048, mesh=1)


TOKEN = 3 * 2 * 256 * 4
"""Bytes of a token in the states of `large`."""


def test_states_use_the_memory_of_their_tokens_and_return_it() -> None:
    engine = large().engine(EngineOptions(memory=1 << 27, share_prefixes=False))
    assert (engine.limits.memory, list(engine.limits.taken(2048))) == (1 << 27, [2048 * TOKEN])
    # Models of other tests keep the last sequence that they generated, until they are collected.
    gc.collect()
    before = _resident()
    with engine:
        for _ in range(2):
            requests = [engine.submit([1] * 500, 1500) for _ in range(3)]
            while len(requests[-1].tokens) < 3:
                engine.step()
            live = sum(len(r.prompt) + len(r.tokens) - 1 for r in requests) * TOKEN
            assert live <= _resident() - before <= live * 1.05
            for request in requests:
                request.cancel()
            engine.run()
            gc.collect()
            assert _resident() == before


def test_requests_that_begin_alike_use_the_same_memory() -> None:
    prompt = [n % VOCABULARY for n in range(700)]
    before = _resident()
    with large().engine(EngineOptions()) as engine:
        first = engine.submit(prompt, 4)
        first.result()
        requests = [engine.submit([*prompt[: 300 + n], 7], 300) for n in range(6)]
        while len(requests[-1].tokens) < 3:
            engine.step()
        assert engine.shared_tokens == sum(300 + n for n in range(6))
        unlike = sum(1 + len(r.tokens) for r in requests)
        # A page at the end of each run is its own.
        own = 6 * 3 * 2 * 4 * PAGE
        assert _resident() - before <= (703 + unlike) * TOKEN * 1.05 + own
    gc.collect()
    assert _resident() == before


def _resident() -> int:
    """The bytes of states that are in memory, pages that several requests share once."""
    total, is_state = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                is_state = "memfd:distir-states" in line
            elif is_state and line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def test_what_does_not_fit_is_refused_at_once() -> None:
    generation = compiled()
    with pytest.raises(RunError, match="expected memory for the states of 16 requests, of 256 B a token and 0 B a"):
        generation.engine(EngineOptions(memory=100))
    with pytest.raises(RunError, match="expected at most 64 rows in a step, found 160: a chunk and two for each"):
        generation.engine(EngineOptions(batch_invariant=True))
    with generation.engine(EngineOptions(memory=20 * 256)) as engine:
        with pytest.raises(RunError, match="expected at most 20 tokens of a request, which fit into memory, found 21"):
            engine.submit([1] * 11, 10)
        with pytest.raises(RunError, match="expected at most 64 tokens, found a prompt of 60 and 10 new ones"):
            engine.submit([1] * 60, 10)
        with pytest.raises(RunError, match="expected token ids from 0 to 60, found 61"):
            engine.submit([1, 61], 10)
        with pytest.raises(RunError, match="expected a prompt of at least one token"):
            engine.submit([], 10)
        with pytest.raises(RunError, match="expected the token ids of one prompt, found a batch"):
            engine.submit([[1], [2]], 10)  # type: ignore[list-item]
        with pytest.raises(RunError, match="expected token ids to stop at from 0 to 60, found 61"):
            engine.submit([1], 10, stop={61})
        with pytest.raises(RunError, match="expected at most 20 tokens of a request, which fit into memory, found 31"):
            engine.submit([1] * 30, 10, fit=True)
        assert engine.submit([1] * 11, 10, fit=True).result() == alone("llama", [1] * 11, 9)
    with pytest.raises(RunError, match="the engine is closed"):
        engine.submit([1], 1)


def test_an_error_of_a_rank_ends_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = compiled("llama", "1/3/1/1").engine()
    requests = [engine.submit([1, 2], 5), engine.submit([3], 5)]
    engine.step()
    step = RankRequests.step

    def fails(self: RankRequests, slots: Sequence[Slot], ended: Collection[int] = ()) -> Any:
        if self._comm.rank == 1:
            raise RunError("no memory left")
        return step(self, slots, ended)

    monkeypatch.setattr(RankRequests, "step", fails)
    for use in (engine.run, requests[0].result, lambda: engine.submit([1], 1)):
        with pytest.raises(RunError, match=r"no memory left \(on rank 1 of 3\)"):
            use()
    assert [request.ended for request in requests] == ["error", "error"]
    engine.close()


def test_a_program_that_continues_nothing_is_refused() -> None:
    plan = dr.compile(torch.nn.Linear(3, 4), (torch.randn(2, 3),), mesh=1)
    with pytest.raises(RunError, match="the program does not continue sequences"):
        Engine(ThreadRequests(plan.bundle()), plan.bundle())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    for name, strategy in (("two", "1/2/1/1"), ("stages", "1/1/2/1"), ("five", "1/5/1/1")):
        compiled("gpt2", strategy).plan.save(folder / f"{name}.dist", backends=("torch",))
    return folder


@pytest.mark.drawn(1)
@pytest.mark.mpirun
@pytest.mark.usefixtures("quick_launches")
@pytest.mark.parametrize(
    ("name", "launcher"), [("two", "mpirun"), ("stages", "mpirun"), ("stages", "torchrun"), ("five", "mpirun")]
)
def test_ranks_that_are_processes_give_the_same_tokens(saved: Path, name: str, launcher: str) -> None:
    bundle = read_bundle(saved / f"{name}.dist")
    with start_engine(bundle, EngineOptions(max_requests=3, drafts=2), launcher) as engine:
        requests = [engine.submit(prompt, 8) for prompt in prompts(5)]
        options = {"temperature": 0.7, "seed": 4, "repetition_penalty": 1.5, "presence_penalty": 1.0}
        drawn = engine.submit(prompts(1)[0], 8, options)
        engine.run()
        for request in requests:
            assert request.tokens == alone("gpt2", list(request.prompt), 8)
        assert drawn.tokens == compiled("gpt2").generate(prompts(1)[0], 8, **options).tolist()  # type: ignore[misc]
    assert not _ranks()


@pytest.mark.mpirun
@pytest.mark.usefixtures("quick_launches")
def test_stages_are_idle_while_the_others_compute(saved: Path) -> None:
    """With one request, of two stages at most one computes at any time."""
    with start_engine(read_bundle(saved / "stages.dist"), EngineOptions(max_requests=1)) as engine:
        assert engine.idle() == [0.0, 0.0]
        engine.submit([1, 2, 3], 20).result()
        idle = engine.idle()
    assert all(0.1 < share < 1.0 for share in idle)
    assert sum(idle) >= 0.95


@pytest.mark.mpirun
@pytest.mark.usefixtures("quick_launches")
def test_a_killed_rank_ends_the_engine(saved: Path) -> None:
    engine = start_engine(read_bundle(saved / "two.dist"))
    request = engine.submit([1, 2, 3], 40)
    engine.step()
    max(_ranks(), key=lambda p: p.pid).kill()
    with pytest.raises(RunError, match=r"rank \d was ended by signal 9|rank \d has ended|rank \d was killed"):
        engine.run()
    assert request.ended == "error"
    engine.close()
    assert not _ranks()


def _ranks() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "rank_server" in _words(child)]


def _words(process: psutil.Process) -> str:
    """Its command; none of a process that has ended."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def test_ranks_compare_their_communication_in_the_first_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[int] = []
    check = Communicator._check_group_step

    def counted(comm: Communicator, axis: int) -> None:
        checks.append(axis)
        check(comm, axis)

    monkeypatch.setattr(Communicator, "_check_group_step", counted)
    ranks = ThreadRequests(compiled("llama", "1/3/1/1").plan.bundle(("torch",)))
    ranks.logits([Slot(0, 0, [3, 5, 7], 1, 9)])
    found = len(checks)
    ranks.logits([Slot(0, 3, [2], 1, 9)])
    ranks.close()
    assert found > 0
    assert len(checks) == found
