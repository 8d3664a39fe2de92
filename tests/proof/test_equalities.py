"""Elements that broadcasting makes equal: those of the proof are equal in the results of the ops themselves."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch

from distir_relax.ir import Op, TensorType, Value
from distir_relax.ops import evaluate, infer, lookup
from distir_relax.proof.local_ops import Instance
from distir_relax.proof.pieces import Equalities, Tables
from tests.ops.samples import SAMPLES, Sample, draw


def is_followed(name: str, sample: Sample) -> bool:
    """Whether the sharded program may have the op: it has a factor rule."""
    try:
        kinds = [kind_of(draw(text, torch.Generator())) for text in sample.operands]
        lookup(name).rule_for(kinds, sample.attrs, infer(name, kinds, sample.attrs))
    except NotImplementedError:
        return False
    return True


def kind_of(x: torch.Tensor) -> TensorType:
    return TensorType(tuple(x.shape), str(x.dtype).removeprefix("torch."))


CASES = [(name, sample) for name, samples in SAMPLES.items() for sample in samples if is_followed(name, sample)]


@pytest.mark.parametrize(("name", "sample"), CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)])
def test_equal_elements(name: str, sample: Sample) -> None:
    """Operands are the same along one factor after the other: so are results where the proof says so."""
    generator = torch.Generator().manual_seed(1)
    tensors = [draw(text, generator) for text in sample.operands]
    kinds = [kind_of(x) for x in tensors]
    types = infer(name, kinds, sample.attrs)
    values = [Value(f"x{i}", kind) for i, kind in enumerate((*kinds, *types))]
    op = Op(name, tuple(values[: len(kinds)]), tuple(values[len(kinds) :]), sample.attrs)
    rule = lookup(name).rule_for(kinds, sample.attrs, types)
    for factor in [None, *set(chain(*chain(*rule.operands)))]:
        tables = Tables()
        equalities: list[Equalities] = []
        same = []
        for x, dims in zip(tensors, rule.operands, strict=True):
            own = [tables.equal(n) if dim == (factor,) else None for n, dim in zip(x.shape, dims, strict=True)]
            equalities.append(tuple(own))
            for dim, equality in enumerate(own):
                if equality is not None:
                    x = x.narrow(dim, 0, 1).expand_as(x)
            same.append(x.contiguous())
        instance = Instance(op, tuple(kinds), types, tuple(equalities))
        found = instance.equalities_of_results(tables)
        for result, of_dims in zip(evaluate(op, same), found, strict=True):
            for dim, equality in enumerate(of_dims):
                if equality is not None:
                    firsts = torch.from_numpy(np.array(tables.rows[equality]))
                    torch.testing.assert_close(result, result.index_select(dim, firsts), equal_nan=True)
