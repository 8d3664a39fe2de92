"""Some of the models of `random_models`, which has more."""

from __future__ import annotations

import pytest

from distir_relax.kernels.quantized import linear
from tests.precision import random_quantized_models as random_models


@pytest.mark.drawn(3)
@pytest.mark.parametrize("seed", range(7))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_random_model_is_that_with_dequantized_weights(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_kernel", lambda *arguments: None)
    random_models.check(seed)
