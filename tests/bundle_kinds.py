"""Small valid bundles of all kinds, as files in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import distir_relax as dr
from distir_relax.bundle import FileTensor, FileWeights, TensorWeights, read_bundle, write_bundle
from tests.readers import symbolic_plan

Files = dict[str, bytes]


def _layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 3)).eval()


def tensor(path: Path) -> None:
    """Columns, then rows, of two layers on 2 ranks."""
    dr.compile(_layers(), (torch.ones(2, 5),), mesh=2, shardings={"0.weight": "S[0]"}).save(path)


def uneven(path: Path) -> None:
    """Three ranks with 4, 1 and 2 columns: three programs."""
    dr.compile(_layers(), (torch.ones(2, 5),), mesh=3, shardings={"0.weight": "S[0: 4|1|2]"}).save(path)


def padded(path: Path) -> None:
    """Three ranks with padded columns."""
    dr.compile(_layers(), (torch.ones(2, 5),), mesh=3, shardings={"0.weight": "S[0]"}, tail="pad").save(path)


class Blocks(torch.nn.Module):
    """Three equal blocks, which are one function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 6)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def pipeline(path: Path) -> None:
    """Two stages, three microbatches."""
    dr.compile(Blocks().eval(), (torch.ones(6, 6),), strategy="1/1/2/3").save(path)


def symbolic(path: Path) -> None:
    """Batches of any size on 3 ranks, with a guard."""
    symbolic_plan().save(path)


def referring(path: Path) -> None:
    """Weights in a file beside the bundle."""
    model = _layers()
    file = path.parent / "model.safetensors"
    save_file(model.state_dict(), file)
    bundle = dr.compile(model, (torch.ones(2, 5),), mesh=2, shardings={"0.weight": "S[0]"}).bundle(("torch",))
    opened = FileWeights(file, ())
    weights = TensorWeights({name: FileTensor.deferred(opened, name) for name in opened.kinds})
    write_bundle(replace(bundle, weights=weights), path, refer=True)
    assert read_bundle(path).manifest.weight_files


def searched(path: Path) -> None:
    """Placements by autosharding, with the query."""
    dr.compile(_layers(), (torch.ones(2, 5),), mesh=2, shardings="auto").save(path)


def training(path: Path) -> None:
    """A step of AdamW with a schedule, clipping and an evaluation."""
    loss = torch.nn.functional.cross_entropy
    batch = torch.ones(6, 5), torch.zeros(6, dtype=torch.int64)
    step = dr.compile_training(
        _layers().train(), loss, optimizer=dr.optim.AdamW(lr=1e-3), example_batch=batch, clip_norm=1.0,
        metrics={"entropy": loss}, strategy="3/1/1/1",
    )  # fmt: skip
    step.save(path)


def _language_model() -> Any:
    import transformers

    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=411, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def generation(path: Path) -> None:
    """A language model with its tokenizer, which also runs requests."""
    from tests.tokenizers_of_tests import of_pieces, of_transformers

    tokenizer = of_transformers(of_pieces())
    dr.compile_generation(_language_model(), tokenizer=tokenizer, strategy="1/2/1/1", max_batch=2).plan.save(path)


def quantized(path: Path) -> None:
    """A language model with weights of 4 bits."""
    dr.compile_generation(_language_model(), precision="int4", strategy="1/2/1/1", max_batch=2).plan.save(path)


def encoder_decoder(path: Path) -> None:
    """T5, with the bundle of its encoder inside."""
    import transformers

    torch.manual_seed(3)
    config = transformers.T5Config(
        vocab_size=31, d_model=12, d_kv=6, d_ff=14, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    generation = dr.compile_generation(model, strategy="1/2/1/1", max_length=16, max_batch=2, max_source=9)
    generation.plan.save(path)


def adapters(path: Path) -> None:
    """A step that trains a low-rank update of frozen layers."""

    class Adapted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.base = torch.nn.Linear(5, 7).requires_grad_(False)
            self.a, self.b = torch.nn.Linear(5, 2, bias=False), torch.nn.Linear(2, 7, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.b(self.a(x)) * 0.5

    batch = torch.ones(4, 5), torch.zeros(4, 7)
    loss = torch.nn.functional.mse_loss
    dr.compile_training(Adapted(), loss, example_batch=batch, optimizer=dr.optim.SGD(lr=0.1), strategy="1/2/1/1").save(
        path
    )


KINDS: Mapping[str, Callable[[Path], None]] = {
    make.__name__: make
    for make in (
        tensor, uneven, padded, pipeline, symbolic, referring, searched, training, adapters, generation, quantized,
        encoder_decoder,
    )
}  # fmt: skip
QUICK = ("tensor", "uneven", "pipeline", "symbolic", "referring", "training")
"""Kinds that take less than a second each to compile."""


@cache
def files_of(kind: str) -> Files:
    """The files of a bundle of this kind in the folder ``m.dist``, and those beside it, by their paths."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        KINDS[kind](folder / "m.dist")
        return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}
