"""Several prompts of one call are requests of an engine, which runs the programs of the session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from distir_relax.errors import RunError
from distir_relax.runtime.requests import RankRequests, SessionRequests
from distir_relax.serving import EngineOptions
from tests.imported_once import compile_language_model
from tests.test_generation import VOCABULARY, compiled, model

LENGTHS = (3, 11, 1, 7, 5)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of requests of each step of the first rank."""
    found: list[int] = []
    run = RankRequests.step

    def step(self: RankRequests, slots: Any, ended: Any = ()) -> Any:
        if self._comm.rank == 0:
            found.append(len(slots))
        return run(self, slots, ended)

    monkeypatch.setattr(RankRequests, "step", step)
    return found


@pytest.mark.parametrize(("kind", "strategy"), [("llama", "1/1/1/1"), ("llama", "1/3/1/1"), ("gpt2", "1/2/1/1")])
def test_prompts_share_steps_and_get_the_tokens_of_each_alone(kind: str, strategy: str, steps: list[int]) -> None:
    generation = compiled(kind, strategy)
    alone = [generation.generate(each, 9).tolist() for each in prompts()]
    assert not steps
    assert [found.tolist() for found in generation.generate(prompts(), 9)] == alone
    assert max(steps) == len(LENGTHS)
    # The last step frees the requests.
    assert len(steps) <= 11
    ends = [tokens[3] for tokens in alone]
    cut = [generation.generate(each, 9, stop=ends).tolist() for each in prompts()]
    assert [found.tolist() for found in generation.generate(prompts(), 9, stop=ends)] == cut
    assert {len(tokens) for tokens in cut} != {9}


def test_draws_of_a_seed_are_those_of_each_alone() -> None:
    generation = compiled("llama", "1/3/1/1")
    options: dict[str, Any] = {"temperature": 1.3, "top_k": 7, "seed": 11, "repetition_penalty": 1.2}
    alone = [generation.generate(each, 12, **options).tolist() for each in prompts()]
    assert [found.tolist() for found in generation.generate(prompts(), 12, **options)] == alone
    assert alone[0] != generation.generate(prompts()[0], 12).tolist()


OTHERS = {
    "batch on two ranks": lambda: compiled("llama", "2/1/1/1"),
    "two stages": lambda: compile_language_model(
        model("llama"), strategy="1/1/2/1", stages=("model.layers.1",), max_batch=4
    ),
    "experts": lambda: compiled("mixtral", "1/2/1/1"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_programs_continue_one_prompt_after_the_other(name: str, steps: list[int]) -> None:
    generation = OTHERS[name]()
    alone = [generation.generate(each, 6).tolist() for each in prompts()]
    assert [found.tolist() for found in generation.generate(prompts(), 6)] == alone
    assert not steps


def test_a_prompt_without_room_is_refused_before_any_runs(steps: list[int]) -> None:
    generation = compiled()
    with pytest.raises(RunError, match=r"expected at most \d+ tokens, found a prompt of 1 and 1000 new ones"):
        generation.generate([[3], [1, 2, 3]], 1000)
    with pytest.raises(RunError, match="expected token ids"):
        generation.generate([[3], [VOCABULARY, 2, 3]], 2)
    assert not steps
    assert [len(found) for found in generation.generate([[3], [1, 2]], 0)] == [0, 0]


def test_an_error_in_a_step_is_that_of_the_call_and_the_session_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    generation = compiled("llama", "1/3/1/1")
    expected = generation.generate([3, 4], 5).tolist()
    with monkeypatch.context() as changed:
        run: Callable[..., Any] = RankRequests.step

        def step(self: RankRequests, slots: Any, ended: Any = ()) -> Any:
            if self._comm.rank == 1:
                raise ValueError("no")
            return run(self, slots, ended)

        changed.setattr(RankRequests, "step", step)
        with pytest.raises(ValueError, match="no"):
            generation.generate([[3, 4], [5]], 5)
    assert generation.generate([3, 4], 5).tolist() == expected
    first, _ = generation.generate([[3, 4], [5]], 5)
    assert first.tolist() == expected


def test_an_engine_of_one_rank_shares_its_weights() -> None:
    generation = compiled()
    expected = [generation.generate(each, 7).tolist() for each in prompts()]
    session = generation.plan.session("torch")
    with generation.engine() as engine:
        assert isinstance(engine._executor, SessionRequests)
        (ranks,) = engine._executor._ranks
        assert ranks._program is session.programs[0].requests  # type: ignore[attr-defined]
        requests = [engine.submit(each, 7) for each in prompts()]
        # A call in between has states of its own.
        engine.step()
        assert generation.generate(prompts()[1], 7).tolist() == expected[1]
        assert [request.result() for request in requests] == expected
    with compiled("llama", "1/3/1/1").engine(EngineOptions(max_requests=2)) as engine:
        assert not isinstance(engine._executor, SessionRequests)
        assert engine.submit(prompts()[0], 7).result() == expected[0]
