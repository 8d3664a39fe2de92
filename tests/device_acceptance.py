"""Ranks compute the same on another device as on the CPU: ``python -m tests.device_acceptance``.

It takes ops, language models in chunks, generation of many requests, pictures, and steps of training, with ranks as
threads that share the device, and prints a line for each. It exits 1 if one differs, and 2 without the device.
``--device cpu`` compares the CPU with itself. With ``--cases FOLDER`` compiled programs are kept there: the machine
with the device needs no compiler then. `tests/lowering/test_devices.py` has what can be tested without a device.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import distir_relax as dr
from distir_relax.bundle import Bundle, read_bundle, write_bundle
from distir_relax.errors import DistIRError
from distir_relax.lowering.emit.torch import to_torch
from distir_relax.ops import evaluate
from distir_relax.runtime.backends.torch import load_text, prepare_weights
from distir_relax.runtime.generation.sampling import GREEDY, Sampling
from distir_relax.runtime.machine import rank_device
from distir_relax.runtime.session import Session
from distir_relax.runtime.transports.threads import ThreadWorld
from distir_relax.serving import THREADS, start_engine
from distir_relax.support.torch_compat import tree_leaves
from tests import chunk_acceptance, zoo
from tests.families import FAMILIES
from tests.incremental.chunks import cuts
from tests.incremental.language_models import (
    ENCODER_DECODERS,
    LENGTH,
    MODELS,
    STATE_SPACE,
    VOCABULARY,
    language_model,
    with_large_weights,
)
from tests.lowering.op_samples import NO_WEIGHTS, Sample, operand_data, sample_module, samples

STRATEGIES = ("1/1/1/1", "1/3/1/1", "1/1/2/1")
STEPS = 4
NARROW = 2e-2
"""Tolerance of steps in 16 bits."""
ROUNDED = {"mixtral": 2e-4, "llama": 1e-5}
"""Tolerances of models that compute some ops in float32 whatever their dtype; 1e-8 for others."""


@dataclass(frozen=True)
class Program:
    """A compiled program with `data` for its runs. `check(bundle, data, device)` is the largest difference found."""

    name: str
    tolerance: float
    make: Callable[[], tuple[Bundle, Any]]
    check: Callable[[Bundle, Any, str], float]

    def run(self, device: str, folder: Path | None) -> float:
        """Check it, compiled now or read from a folder, where it is written if it is not there."""
        if folder is None:
            return self.check(*self.make(), device)
        path = folder / f"{''.join(c if c.isalnum() else '-' for c in self.name)}.dist"
        if not path.exists():
            bundle, data = self.make()
            torch.save(data, path.with_suffix(".pt"))
            write_bundle(bundle, path)
        return self.check(read_bundle(path), torch.load(path.with_suffix(".pt"), weights_only=False), device)


def check_op(sample: Sample, device: str) -> float:
    """Run a rank's program of one op on `device`; return the largest difference from its reference on the CPU."""
    worst = 0.0
    for weights_from in (NO_WEIGHTS, 0):
        module, ops = sample_module([sample], (weights_from,))
        (text,) = to_torch(module, "sample").values()
        loaded = load_text(text, "sample", "<sample>")
        comm = ThreadWorld(dr.DeviceMesh((1,), ("x",))).communicator(0, device)
        values = operand_data(ops)[0]
        inputs = module.function(module.ranks[0]).inputs
        expected = evaluate(ops[0], [v.clone() for v in values])
        tensors = {i.value.name: v.to(device) for i, v in zip(inputs, values, strict=True)}
        with torch.inference_mode():
            stored = {i.value.name: tensors[i.value.name] for i in inputs if i.role != "input"}
            weights = prepare_weights(loaded, comm, stored)
            given = [tensors[i.value.name].clone() for i in inputs if i.role == "input"]
            found = loaded.main(comm, weights, *given)
            for result, reference in zip(tree_leaves(found), expected, strict=True):
                assert result.device.type == torch.device(device).type, f"the result is on {result.device}"
                worst = max(worst, difference(result, reference))
    return worst


def chunked(name: str, strategy: str) -> tuple[Bundle, Any]:
    """Return the incremental program of a language model, with the inputs of a sequence, and its logits."""
    sequence = chunk_acceptance.whole(name)
    data = sequence.tokens, sequence.inputs, sequence.logits
    return chunk_acceptance.compiled(name, strategy).bundle(("torch",)), data


def check_chunks(bundle: Bundle, data: tuple[str, Mapping[str, torch.Tensor], torch.Tensor], device: str) -> float:
    """Cut a sequence into random chunks; return the largest difference from the model's logits."""
    session = Session(bundle, device=device)
    tokens, given, expected = data
    encoded = {key: x for key, x in given.items() if key != tokens}
    worst = 0.0
    for seed in range(3):
        parts = []
        for first, last in itertools.pairwise(cuts(LENGTH, seed)):
            inputs = {tokens: given[tokens][:, first:last], **({} if first else encoded)}
            parts.append(session(inputs, outputs=["logits"], past=first)["logits"])
        worst = max(worst, difference(torch.cat(parts, 1), expected))
    return worst


def generating(name: str, strategy: str) -> tuple[Bundle, Any]:
    """Return a program for generation, and prompts."""
    generation = dr.compile_generation(with_large_weights(language_model(name)), strategy=strategy, max_length=64)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in (1, 7, 19, 30, 3)]
    return generation.plan.bundle(("torch",)), prompts


def check_requests(bundle: Bundle, prompts: Sequence[Sequence[int]], device: str) -> float:
    """Generate for requests together, greedy and drawn; return how many get other tokens than on the CPU."""
    options = (GREEDY, Sampling(temperature=0.8, top_k=7, seed=5))
    tokens = []
    for where in (device, "cpu"):
        with start_engine(bundle, None, THREADS, where) as engine:
            running = [engine.submit(prompt, 20, each) for prompt in prompts for each in options]
            tokens.append([list(request) for request in running])
    return float(sum(a != b for a, b in zip(*tokens, strict=True)))


def cut_up(name: str) -> tuple[Bundle, Any]:
    """Return a model that `zoo` cuts on three ranks, with its inputs and outputs by name."""
    case = getattr(zoo, name)()
    plan = dr.compile(case.model, case.args, case.kwargs, mesh=3, shardings=case.shardings)
    inputs = plan.imported.flatten(case.args, case.kwargs)
    with torch.no_grad():
        found = case.model(*case.args, **case.kwargs)
    return plan.bundle(("torch",)), (inputs, [x for x in tree_leaves(found) if isinstance(x, torch.Tensor)])


def check_call(bundle: Bundle, data: tuple[Mapping[str, torch.Tensor], Sequence[torch.Tensor]], device: str) -> float:
    """Run a program once; return the largest difference from the model's outputs."""
    inputs, expected = data
    found = Session(bundle, device=device)(inputs)
    return max(difference(a, b) for a, b in zip(found.values(), expected, strict=True))


def trained(name: str, strategy: str, precision: str | None = None) -> tuple[Bundle, Any]:
    """Return a step of training for a family of models, and its inputs."""
    torch.manual_seed(0)
    # AdamW divides gradients by their own size, rounding errors too, which are large in float32.
    is_wide = precision is None and name != "mixtral"
    optimizer = dr.optim.AdamW(lr=1e-3) if is_wide else dr.optim.SGD(lr=0.02, momentum=0.9)
    family = FAMILIES[name]()
    model = family.model.to(torch.float64 if is_wide else torch.float32).train()
    step = dr.compile_training(
        model, optimizer=optimizer, example_batch=family.args, strategy=strategy, precision=precision
    )
    return step.bundle(("torch",)), step.numbers(step.plan.imported.flatten(family.args, {}))


def check_training(bundle: Bundle, inputs: Mapping[str, torch.Tensor], device: str) -> float:
    """Train for some steps; return the largest difference of losses and parameters from those on the CPU.

    It is relative to the largest of all numbers: those whose gradient is zero but for rounding differ by as much as
    they are large.
    """
    found, scales = [], []
    for where in (device, "cpu"):
        session = Session(bundle, device=where)
        losses = [next(iter(session(inputs).values())).view(1) for _ in range(STEPS)]
        state = dict(sorted(session.state().items()))
        # Next to the scale of the loss all other numbers are small.
        scales.append(float(state.pop("loss_scale", 0.0)))
        found.append(torch.cat([*losses, *(x.double().flatten() for x in state.values())]))
    return difference(*found) if scales[0] == scales[1] else float("inf")


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest number; infinite for other shapes or places of NaN."""
    a, b = found.detach().cpu().double(), expected.detach().double()
    if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    a, b = a[b.isfinite()], b[b.isfinite()]
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) if a.numel() else 0.0


def programs() -> Iterator[Program]:
    """Yield all programs."""
    for name in (*MODELS, *STATE_SPACE, *ENCODER_DECODERS):
        for strategy in STRATEGIES:
            made = partial(chunked, name, strategy)
            yield Program(f"chunks of {name}, {strategy}", chunk_acceptance.TOLERANCE, made, check_chunks)
    for name in ("llama", "gpt2", "falcon with alibi", "mixtral"):
        for strategy in STRATEGIES:
            yield Program(f"requests of {name}, {strategy}", 0.0, partial(generating, name, strategy), check_requests)
    for name in ("mlp", "gpt2", "resnet", "mobilenet", "unet", "uneven_unet"):
        yield Program(f"call of {name}", 2e-5, partial(cut_up, name), check_call)
    for name in FAMILIES:
        for strategy in ("1/1/1/1", "3/1/1/1,zero=2", "1/2/1/1"):
            made = partial(trained, name, strategy)
            yield Program(f"training of {name}, {strategy}", ROUNDED.get(name, 1e-8), made, check_training)
    for name in ("llama", "gpt2"):
        for precision in ("bf16", "fp16"):
            made = partial(trained, name, "3/1/1/1,zero=2", precision)
            yield Program(f"training of {name} in {precision}", NARROW, made, check_training)


def checks(device: str, folder: Path | None) -> Iterator[tuple[str, float, Callable[[], float]]]:
    """Yield all checks: a name, the largest difference allowed, and the function that finds the difference."""
    for sample in samples(with_tvm=False):
        yield f"op {sample[0]} of {', '.join(map(str, sample[1]))}", 2e-5, partial(check_op, sample, device)
    for program in programs():
        yield program.name, program.tolerance, partial(program.run, device, folder)


def main() -> int:
    """Run the checks whose names have one of the words, by default all, and print how each ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", type=Path)
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    try:
        device = rank_device(options.device, 0)
    except DistIRError as error:
        print(error)
        return 2
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    # By default torch rounds operands of convolutions on GPUs to 10 bits.
    torch.backends.cudnn.allow_tf32 = False
    passed = failed = 0
    begun = time.perf_counter()
    for name, tolerance, check in checks(device, options.cases):
        if options.words and not any(word in name for word in options.words):
            continue
        start = time.perf_counter()
        try:
            found = check()
            is_right, verdict = found <= tolerance, f"{found:.1e}, allowed {tolerance:.0e}"
        except Exception as error:
            is_right, verdict = False, "".join(traceback.format_exception(error, limit=-4))
        passed, failed = passed + is_right, failed + (not is_right)
        if not is_right or not name.startswith("op "):
            print(f"{'' if is_right else 'FAILED '}{name}: {verdict} ({time.perf_counter() - start:.1f} s)", flush=True)
    seconds = time.perf_counter() - begun
    print(f"{passed} passed, {failed} failed on {device}, {seconds:.0f} s, torch {torch.__version__}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
