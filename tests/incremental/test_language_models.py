"""Language models of transformers, unmodified: a sequence in random chunks gives the logits of the whole one."""

from __future__ import annotations

import pytest
import torch

import distir_relax as dr
from distir_relax.frontends.torch.importer import import_torch
from distir_relax.interpret.causality import check_causality
from distir_relax.interpret.length_dependence import check_length_independence
from distir_relax.ir import CachedState
from tests.incremental.chunks import cuts, derived, in_chunks
from tests.incremental.language_models import LENGTH, MODELS, VOCABULARY, language_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
WAYS = 5


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", MODELS)
def test_chunks_give_the_logits_of_the_whole(name: str) -> None:
    model = language_model(name)
    config = model.config
    dims = {"input_ids": {0: "batch", 1: dr.Dim("sequence", max=256)}}
    example = torch.randint(0, VOCABULARY, (2, 9))
    imported = import_torch(model, (example,), {"use_cache": False}, dynamic_shapes=dims)
    check_causality(imported.module, imported.tensors, "sequence")
    check_length_independence(imported.module, imported.tensors, "sequence")
    module = derived(imported)
    grown = [record for record in module.records if isinstance(record, CachedState)]
    # Keys and values of both layers, before they are repeated for the heads of a group.
    assert len(grown) == 4
    kept = {i.value.name: i.value.tensor for i in module.main.inputs if i.value.name in {s.input for s in grown}}
    heads = config.num_attention_heads
    groups = 1 if config.model_type == "falcon" else getattr(config, "num_key_value_heads", heads)
    width = groups * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    assert all(kind.typical.elements == 2 * 8 * width for kind in kept.values()), kept
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    for seed in range(WAYS):
        found = in_chunks(module, imported, {"input_ids": ids}, cuts(LENGTH, seed))
        torch.testing.assert_close(found["logits"], expected, rtol=1e-5, atol=1e-6)
