"""Models of several layers: one function for them all, the same results, the same placements, the same collectives."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers
from torch.utils._pytree import tree_leaves

import distir_relax as dr
from distir_relax.compiler.pass_pipeline import fuse_for_ranks
from distir_relax.ir import Module, inline, parse, print_module, verify
from distir_relax.ops import check
from distir_relax.sharding import list_reshards
from distir_relax.simulation.simulator import simulate_module
from tests.imported_once import compile_case
from tests.zoo import Case, gpt2, made_once

transformers.logging.set_verbosity_error()
pytestmark = pytest.mark.shares("outlined models")


def llama(layers: int = 3) -> Case:
    """Three heads of keys and values for six of queries; an inner width of 127, cut at multiples of 32."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=48, intermediate_size=127, num_attention_heads=6, num_key_value_heads=3,
        vocab_size=97,
    )  # fmt: skip
    shardings = {"*.self_attn.[qkv]_proj.weight": "S[0]", "*.mlp.gate_proj.weight": "S[0: /32]"}
    shardings["lm_head.weight"] = "S[0: /16]"
    model = transformers.LlamaForCausalLM(config).eval()
    return Case(model, (torch.randint(0, 97, (2, 13)),), {"use_cache": False}, shardings)


def bert(layers: int = 3) -> Case:
    """Norms behind the residuals, and a mask of the user's."""
    torch.manual_seed(5)
    config = transformers.BertConfig(
        num_hidden_layers=layers, hidden_size=48, intermediate_size=127, num_attention_heads=6, vocab_size=97
    )
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[1, 7:] = 0
    shardings = {f"encoder.layer.*.{name}.weight": "S[0]" for name in ("self.query", "intermediate.dense")}
    call = {"input_ids": torch.randint(0, 97, (3, 11)), "attention_mask": mask}
    return Case(transformers.BertModel(config).eval(), (), call, {**shardings, "input_ids": "R"})


def vit(layers: int = 3) -> Case:
    """Pictures of 30 x 30 in patches of 6."""
    torch.manual_seed(7)
    config = transformers.ViTConfig(
        num_hidden_layers=layers, hidden_size=48, intermediate_size=127, num_attention_heads=6, image_size=30,
        patch_size=6,
    )  # fmt: skip
    model = transformers.ViTModel(config).eval()
    names = [name for name, _ in model.named_parameters()]
    marked = [name for name in names if name.endswith(("query.weight", "q_proj.weight", "intermediate.dense.weight"))]
    assert len(marked) >= layers
    return Case(model, (torch.randn(2, 3, 30, 30),), {}, dict.fromkeys(marked, "S[0]"))


MODELS: dict[str, Callable[..., Case]] = {"llama": llama, "gpt2": gpt2, "bert": bert, "vit": vit}


def _plan(case: Case, ranks: int, tail: str = "ragged", outline: bool = True) -> dr.Plan:
    mesh = dr.DeviceMesh((ranks,), ("tp",))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile_case(case, shardings=case.shardings, mesh=mesh, tail=tail, outline=outline, verify=True)


def _compare(found: Any, expected: Any) -> None:
    pairs = list(zip(tree_leaves(found), tree_leaves(expected), strict=True))
    assert pairs
    for ours, theirs in pairs:
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


def _lines(module: Module, steps: bool = True) -> list[object]:
    """What the ops are, names left out."""
    return [
        (
            op.name,
            op.location,
            [v.type for v in op.operands],
            [v.type for v in op.results],
            {key: value for key, value in op.attrs.items() if key != "step" or steps},
        )
        for function in module.functions
        for op in function.ops
    ]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("tail", ["ragged", "pad"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("name", MODELS)
def test_sharded_results_are_those_of_the_model(name: str, ranks: int, tail: str) -> None:
    case = made_once(MODELS[name])
    plan = _plan(case, ranks, tail)
    assert len(plan.modules["sharded"].functions) > 1
    with torch.inference_mode():
        _compare(plan(*case.args, **case.kwargs), case.model(*case.args, **case.kwargs))


@pytest.mark.parametrize("tail", ["ragged", "pad"])
@pytest.mark.parametrize("name", MODELS)
def test_the_program_written_out_is_that_without_functions(name: str, tail: str) -> None:
    case = made_once(MODELS[name])
    plan, whole = _plan(case, 3, tail), _plan(case, 3, tail, outline=False)
    for stage in ("global", "sharded", "distributed", "ranked"):
        module, flat = plan.modules[stage], whole.modules[stage]
        assert len(flat.functions) == len(set(flat.ranks) or {"main"})
        assert parse(print_module(module)) == module
        verify(inline(module), check)
        assert _lines(inline(module), steps=False) == _lines(flat, steps=False)
    assert plan.modules["ranked"].ranks == whole.modules["ranked"].ranks
    sent = [sum(m.bytes * m.times for m in list_reshards(p.modules["sharded"])) for p in (plan, whole)]
    assert sent[0] == sent[1] > 0


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_the_tvm_backend_runs_programs_with_functions(name: str) -> None:
    case = MODELS[name](2)
    with torch.inference_mode():
        expected = case.model(*case.args, **case.kwargs)
    _compare(_plan(case, 3, "pad")(*case.args, backend="tvm", **case.kwargs), expected)


def test_many_layers_are_as_few_ops_as_two() -> None:
    few, many = (_plan(gpt2(layers), 3) for layers in (2, 24))
    for stage in ("global", "sharded", "distributed", "ranked"):
        small, large = few.modules[stage].functions, many.modules[stage].functions
        assert [f.name for f in small] == [f.name for f in large]
        for one, other in zip(small, large, strict=True):
            calls, rest = (
                [
                    sum(bool(op.callee) == of_calls for op in f.ops if op.name != "annotate_sharding")
                    for f in (one, other)
                ]
                for of_calls in (True, False)
            )
            assert calls in ([0, 0], [2, 24])
            assert rest[0] == rest[1] > 0


def test_a_rank_reads_as_the_model_does() -> None:
    text = _plan(gpt2(3), 3).bundle(("torch",)).programs["programs/main_0.py"]
    assert "def gpt2_block(comm, weights, x):\n" in text
    assert "def prepare_gpt2_block(comm, weights):\n" in text
    assert text.count('gpt2_block(comm, weights["transformer.h.') == 3
    assert 'weights.pop("transformer.h.1.mlp.c_fc.weight")' in text
    assert "  # mlp.c_fc, pytorch_utils.py:" in text


def test_functions_are_simulated_to_the_same_time() -> None:
    """A layer that is entered in the same state again is not simulated again; time and memory are as written out."""
    plan = _plan(llama(7), 3)
    called = dr.simulate(plan, profile="dgx2-v100")
    written = simulate_module(fuse_for_ranks(inline(plan.modules["distributed"])), called.profile)
    assert called.makespan == written.makespan
    assert list(called.peak_memory) == list(written.peak_memory)


def test_weights_that_every_layer_has_are_prepared_once() -> None:
    """ALBERT calls one layer again and again."""
    torch.manual_seed(11)
    config = transformers.AlbertConfig(
        vocab_size=97, embedding_size=24, hidden_size=48, num_hidden_layers=4, num_attention_heads=6,
        intermediate_size=127,
    )  # fmt: skip
    call = {"input_ids": torch.randint(0, 97, (2, 11)), "attention_mask": torch.ones(2, 11, dtype=torch.long)}
    model = transformers.AlbertModel(config).eval()
    case = Case(model, (), call, {"*.query.weight": "S[0]", "*.ffn.weight": "S[0]"})
    plan = _plan(case, 3)
    text = plan.bundle(("torch",)).programs["programs/main_0.py"]
    assert text.count("= prepare_albert_layer_group(") == 1
    assert text.count("= albert_layer_group(comm, ") == 4
    with torch.inference_mode():
        _compare(plan(**call), model(**call))
