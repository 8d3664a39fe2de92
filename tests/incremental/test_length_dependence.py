"""Programs whose positions depend on the length of the sequence, which earlier calls do not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

import distir_relax as dr
from distir_relax.errors import UnsupportedOpError
from distir_relax.frontends.torch.importer import import_torch
from distir_relax.interpret.length_dependence import check_length_independence
from tests.incremental.language_models import GROUPED
from tests.incremental.test_derive import DIMS, Uses, attention, distances, positions, windowed

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def length(x: torch.Tensor) -> torch.Tensor:
    return positions(x).max() + 1


def table(x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    return F.embedding(first, torch.linspace(-1, 1, 6 * 128).sin().reshape(128, 6)) * x


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a factor chosen by the length": (
        lambda x: x * torch.where(length(x) > 8, 2.0, 1.0), r"(?s:greater.* from 9 on.*limit it to 8\b)",
    ),
    "chosen beyond the lengths that are all tried": (
        lambda x: x + torch.where(length(x) > 777, 2.0, 1.0), "greater.* from 778 on",
    ),
    "a base that grows with the length": (
        lambda x: x * torch.where(length(x) > 40, length(x) / 40, 1.0), "greater.* from 41 on",
    ),
    "the number of blocks": (lambda x: x * (x.shape[1] // 20 + 1), "constant.* from 20 on"),
    "positions divided by their number": (lambda x: x + (positions(x) / x.shape[1])[:, None], "add.* their number$"),
    "positions from the end": (lambda x: x + (x.shape[1] - positions(x))[:, None], "add.* their number$"),
    "a table in reverse": (lambda x: table(x, positions(x).flip(0)), "multiply.* their number$"),
    "the last positions": (lambda x: x * (x.shape[1] - positions(x) < 20)[:, None], "less.* their number$"),
    "a term for each position": (lambda x: x + torch.ones(x.shape[1]).sum(), "add.* their number$"),
    "the last number": (lambda x: x + positions(x)[-1], "add.* their number$"),
    "a comparison with the length": (lambda x: x + (x > x.shape[1]), "greater.* their number$"),
    "the length as a number": (lambda x: x * x.shape[1], "multiply.* their number$"),
}  # fmt: skip
LONG = {"x": {0: "batch", 1: dr.Dim("sequence", max=1000)}}


@pytest.mark.parametrize("name", REFUSED)
def test_positions_that_depend_on_the_length_are_refused(name: str) -> None:
    use, message = REFUSED[name]
    imported = import_torch(Uses(use), (torch.randn(2, 9, 6),), dynamic_shapes=LONG)
    with pytest.raises(UnsupportedOpError, match=rf"(?m)^test_derive\.py:\d+: {message}"):
        check_length_independence(imported.module, imported.tensors, "sequence")


INDEPENDENT: dict[str, Callable[[torch.Tensor], Any]] = {
    "a factor chosen beyond the largest length": lambda x: x * torch.where(length(x) > 64, 2.0, 1.0),
    "indices that may count from the end": lambda x: table(x, positions(x)[positions(x)]),
    "distances from the end, as a bias of attention": lambda x: attention(
        x, attn_mask=torch.where(windowed(x), (positions(x) - x.shape[1]).float(), -torch.inf)
    ),
    "the first of the positions": lambda x: x + positions(x)[0],
    "masks": lambda x: attention(x, attn_mask=torch.where(windowed(x), distances(x) * -0.2, -torch.inf)),
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_positions_that_do_not_depend_on_the_length(name: str) -> None:
    imported = import_torch(Uses(INDEPENDENT[name]), (torch.randn(2, 9, 6),), dynamic_shapes=DIMS)
    check_length_independence(imported.module, imported.tensors, "sequence")


def test_rotary_factors_of_long_texts_need_a_bound() -> None:
    """Phi-3 with two sets of factors: within the first it generates the tokens of transformers."""
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 3.0, 5.0, 9.0], "factor": 4.0}
    torch.manual_seed(0)
    model = transformers.Phi3ForCausalLM(
        transformers.Phi3Config(
            **{**GROUPED, "num_hidden_layers": 1}, pad_token_id=0, max_position_embeddings=64,
            rope_parameters=scaling | {"rope_theta": 1e4}, original_max_position_embeddings=16,
        )
    ).eval()  # fmt: skip
    ids = torch.randint(0, 61, (2, 5))
    generation = dr.compile_generation(model, max_length=16)
    expected = model.generate(ids, max_new_tokens=11, do_sample=False, use_cache=False, eos_token_id=None)
    assert torch.equal(generation.generate(ids, 11), expected[:, 5:])
