"""Every ONNX spelling against the test cases of the ONNX standard itself, which come with the onnx package."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from typing import Any

import onnx
import pytest
import torch

from distir_relax.errors import DistIRError, UnsupportedOpError
from distir_relax.frontends.onnx.importer import import_onnx
from distir_relax.frontends.torch.arguments import as_tensor
from distir_relax.interpret.global_executor import interpret
from distir_relax.ir import parse, print_module, verify
from distir_relax.ir.symbols import specialize
from distir_relax.ops import check, onnx_spellings
from tests.frontends.onnx_cases import array, standard_cases

pytestmark = pytest.mark.xdist_group("cases of the ONNX standard")

# What a program cannot say, and refuses: everything else is computed.
REFUSED = re.compile(
    r"training_dropout|"
    r"reduce_(max|min|log_sum_exp)_empty_set|attention_4d_(causal_)?padded_kv_bf16|"
    r"einsum_batch_diagonal|gridsample_volumetric|"
    r"averagepool_[23]d_dilations|batchnorm_.*_training_mode"
)
# The standard shows its result with four digits.
ROUNDED = {"test_averagepool_2d_ceil_last_window_starts_on_pad", "test_gridsample_bicubic"}
# Sequences and optional values are no tensors.
NO_TENSORS = {"test_identity_sequence", "test_identity_opt"}


# Other domains than ONNX's own have no cases in the standard.
SPELLINGS = {name for name in onnx_spellings() if "::" not in name}


@cache
def cases() -> dict[str, list[Any]]:
    """The cases made of spelled ops only, by the ops in them; those of one op by that op."""
    found: dict[str, list[Any]] = defaultdict(list)
    for case in standard_cases():
        ops = {node.op_type for node in case.model.graph.node} if case.model else set()
        if ops and ops <= set(onnx_spellings()) and case.name not in NO_TENSORS:
            found[ops.pop() if len(ops) == 1 else "several"].append(case)
    return found


def run(case: Any, inputs: list[Any], known: set[str]) -> list[torch.Tensor]:
    """The case's outputs, with the inputs `known` built into the model as initialisers."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    feeds: dict[str, Any] = {}
    for item, data in zip(case.model.graph.input, inputs, strict=False):
        if item.name in known:
            model.graph.initializer.append(onnx.numpy_helper.from_array(data, item.name))
        else:
            feeds[item.name] = data
    imported = import_onnx(model, {name: data.shape for name, data in feeds.items()})
    verify(imported.module, check)
    assert parse(print_module(imported.module)) == imported.module
    found = interpret(imported.module.main, {**imported.tensors, **imported.flatten((), feeds)})
    return [found[item.name] for item in case.model.graph.output]


def run_or_refuse(case: Any, inputs: list[Any]) -> list[torch.Tensor] | UnsupportedOpError:
    """With all inputs given at run time; where shapes depend on them, with all but the first known, or all."""
    names = [item.name for item in case.model.graph.input]
    refused: UnsupportedOpError | None = None
    for known in (set(), set(names[1:]), set(names)):
        try:
            return run(case, inputs, known)
        except UnsupportedOpError as error:
            refused = error
    assert refused is not None
    return refused


@pytest.mark.parametrize("op_type", [*sorted(SPELLINGS), "several"])
def test_it_means_what_the_standard_says(op_type: str) -> None:
    computed = 0
    for case in cases()[op_type]:
        for given, expected in case.data_sets:
            results = run_or_refuse(case, [array(x) for x in given])
            if isinstance(results, UnsupportedOpError):
                assert "found dtype" in results.message or REFUSED.search(case.name), f"{case.name}: {results}"
                continue
            computed += 1
            for result, wanted in zip(results, expected, strict=True):
                target = as_tensor(array(wanted))
                half = target.dtype in (torch.float16, torch.bfloat16)
                tolerance = {"rtol": 2e-2, "atol": 2e-3} if half else {"rtol": 1e-5, "atol": 1e-5}
                if case.name in ROUNDED:
                    tolerance["atol"] = 1e-4
                torch.testing.assert_close(
                    result, target, equal_nan=True, msg=lambda text, name=case.name: f"{name}: {text}", **tolerance
                )
    assert computed


def run_open(case: Any, inputs: list[Any], known: set[str]) -> list[torch.Tensor]:
    """The case's outputs by a program for all sizes, at those of the case: equal sizes above 1 are one symbol."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    del model.graph.input[:]
    feeds: dict[str, Any] = {}
    for item, data in zip(case.model.graph.input, inputs, strict=False):
        if item.name in known:
            model.graph.initializer.append(onnx.numpy_helper.from_array(data, item.name))
        else:
            shape = [n if n < 2 else f"n{n}" for n in data.shape]
            kind = item.type.tensor_type.elem_type
            model.graph.input.append(onnx.helper.make_tensor_value_info(item.name, kind, shape))
            feeds[item.name] = data
    imported = import_onnx(model)
    verify(imported.module, check)
    assert parse(print_module(imported.module)) == imported.module
    values = {f"n{n}": n for data in feeds.values() for n in data.shape if n > 1}
    main = specialize(imported.module, values).main
    found = interpret(main, {**imported.tensors, **imported.flatten((), feeds)})
    return [found[item.name] for item in case.model.graph.output]


@pytest.mark.parametrize("op_type", [*sorted(SPELLINGS), "several"])
def test_a_program_for_all_sizes_computes_the_same_or_is_refused(op_type: str) -> None:
    for case in cases()[op_type][:2]:
        for given, expected in case.data_sets:
            names = [item.name for item in case.model.graph.input]
            for known in (set(), set(names[1:])):
                try:
                    results = run_open(case, [array(x) for x in given], known)
                except UnsupportedOpError:
                    continue
                except DistIRError as error:
                    # A guard may reject the small sizes of the case.
                    if "the program was compiled for values" not in error.hint:
                        raise
                    continue
                for result, wanted in zip(results, expected, strict=True):
                    target = as_tensor(array(wanted))
                    half = target.dtype in (torch.float16, torch.bfloat16)
                    tolerance = {"rtol": 2e-2, "atol": 2e-3} if half else {"rtol": 1e-4, "atol": 1e-4}
                    torch.testing.assert_close(result, target, equal_nan=True, **tolerance)
                break


def test_every_spelling_has_a_case() -> None:
    shown = {node.op_type for found in cases().values() for case in found for node in case.model.graph.node}
    assert shown == SPELLINGS
