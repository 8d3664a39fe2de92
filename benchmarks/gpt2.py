"""GPT-2 small, one forward step: ours beside torch eager, torch.compile and torch DTensor on the same two cores.

    python benchmarks/gpt2.py [--rounds 3] [--layers 12] [--precision float32 bf16] [--shapes 1x128 8x128 1x1]

Each contender runs in processes of its own, in turns, so that a busy machine slows all of them alike; a figure is the
median over the steps of all rounds. All results are compared with torch eager in float32. The limit is the sum of the
least times of all ops (`distir roofline`), measured in the same turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SECONDS, LEAST = 3.0, 5
"""Time of the steps of a shape in a round, and their least number."""
SHARDINGS = {
    "transformer.h.*.attn.c_attn.weight": "S[1]",
    "transformer.h.*.mlp.c_fc.weight": "S[1]",
    "transformer.wte.weight": "S[0]",
}

Step = Callable[[Any], Any]
"""Returns the logits of ids."""


def model_and_ids(options: argparse.Namespace, shape: str):
    """GPT-2 small with random weights, and its input."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=options.layers)).eval()
    batch, tokens = map(int, shape.split("x"))
    dtype = {"float32": torch.float32, "bf16": torch.bfloat16}[options.precision[0]]
    return model.to(dtype), torch.randint(0, 50257, (batch, tokens), generator=torch.Generator().manual_seed(1))


def eager(options: argparse.Namespace) -> None:
    """One process, two threads."""
    import torch

    model, _ = model_and_ids(options, "1x1")
    with torch.inference_mode():
        measure(options, lambda ids: model(ids, use_cache=False).logits)


def compiled_by_torch(options: argparse.Namespace) -> None:
    """One process, two threads, code of torch's own compiler."""
    import torch

    model, _ = model_and_ids(options, "1x1")
    forward = torch.compile(lambda ids: model(ids, use_cache=False).logits, dynamic=False)
    with torch.inference_mode():
        measure(options, forward)


def dtensor(options: argparse.Namespace) -> None:
    """One rank of torch's tensor parallelism over gloo: the layout that our annotations give.

    DTensor cannot cut the fused QKV projection by heads, so its columns are put in the order of the ranks beforehand.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    model, _ = model_and_ids(options, "1x1")
    width = model.config.n_embd

    def linear(conv: torch.nn.Module, order: torch.Tensor | None = None) -> torch.nn.Linear:
        weight, bias = conv.weight.data.t().contiguous(), conv.bias.data
        if order is not None:
            weight, bias = weight[order].contiguous(), bias[order].contiguous()
        made = torch.nn.Linear(weight.shape[1], weight.shape[0])
        made.weight.data, made.bias.data = weight, bias
        return made

    parts = torch.arange(3 * width).view(3, 2, width // 2)
    order = parts.permute(1, 0, 2).reshape(-1)
    plan: dict[str, object] = {
        "transformer.wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1)),
    }
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.data.clone())
    for i, block in enumerate(model.transformer.h):
        block.attn.c_attn, block.attn.c_proj = linear(block.attn.c_attn, order), linear(block.attn.c_proj)
        block.mlp.c_fc, block.mlp.c_proj = linear(block.mlp.c_fc), linear(block.mlp.c_proj)
        block.attn.split_size = width // 2
        plan[f"transformer.h.{i}.attn.c_attn"] = ColwiseParallel()
        plan[f"transformer.h.{i}.attn.c_proj"] = RowwiseParallel()
        plan[f"transformer.h.{i}.mlp.c_fc"] = ColwiseParallel()
        plan[f"transformer.h.{i}.mlp.c_proj"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)

    def step(ids: torch.Tensor) -> torch.Tensor:
        dist.barrier()
        return model(ids, use_cache=False).logits

    def whole(logits: torch.Tensor) -> torch.Tensor:
        pieces: list[Any] = [None, None]
        dist.all_gather_object(pieces, logits)
        return torch.cat(pieces, -1)

    def longest(seconds: float) -> float:
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, seconds)
        return max(everyone)

    with torch.no_grad():
        measure(options, step, whole, dist.get_rank() == 0, longest)
    dist.destroy_process_group()


def ours(options: argparse.Namespace) -> None:
    """The ranks of a bundle as processes, called from this one."""
    import distir_relax as dr

    ranks, backend = {"ours-1": (1, "torch"), "ours-2": (2, "torch"), "tvm-2": (2, "tvm")}[options.part]
    for shape in options.shapes:
        path = options.out / f"{options.precision[0]}-{ranks}-{shape}.dist"
        with dr.launch(path, backend=backend, threads=2 // ranks) as session:

            def step(ids: Any, session: Any = session) -> Any:
                return session.run({"input_ids": ids})["logits"]

            measure(options, step, clock=lambda session=session: session.seconds, shapes=[shape])


def measure(
    options: argparse.Namespace,
    step: Step,
    whole: Callable[[Any], Any] = lambda logits: logits,
    is_first: bool = True,
    longest: Callable[[float], float] = lambda seconds: seconds,
    clock: Callable[[], float] | None = None,
    shapes: list[str] | None = None,
) -> None:
    """Time the steps of all shapes; write their seconds, and the logits."""
    import torch

    for shape in shapes or options.shapes:
        _, ids = model_and_ids(argparse.Namespace(layers=0, precision=options.precision), shape)
        step(ids)
        taken: list[float] = []
        until = longest(time.perf_counter()) + SECONDS
        while len(taken) < LEAST or longest(time.perf_counter()) < until:
            start = time.perf_counter()
            logits = step(ids)
            taken.append(time.perf_counter() - start if clock is None else clock())
        logits = whole(logits)
        if is_first:
            name = f"{options.precision[0]}-{options.part}-{shape}"
            torch.save(logits.float(), options.out / f"{name}.pt")
            (options.out / f"{name}.json").write_text(json.dumps(taken))


def compile_ours(options: argparse.Namespace) -> None:
    """Compile bundles for one and two ranks, and all shapes; write the seconds of one of them."""
    import distir_relax as dr

    for shape in options.shapes:
        model, ids = model_and_ids(options, shape)
        for ranks in (1, 2):
            mesh = dr.DeviceMesh((ranks,), ("tp",))
            start = time.perf_counter()
            plan = dr.compile(model, (ids,), {"use_cache": False}, shardings=SHARDINGS, mesh=mesh, name="gpt2")
            seconds = time.perf_counter() - start
            plan.save(options.out / f"{options.precision[0]}-{ranks}-{shape}.dist")
    (options.out / "compile.json").write_text(json.dumps(seconds))


def limit(options: argparse.Namespace) -> None:
    """The least times of all ops on two threads."""
    from distir_relax.bundle import read_bundle
    from distir_relax.calibration.measure_ops import measure_op_times
    from distir_relax.report.op_times import op_times_json

    for shape in options.shapes:
        found = measure_op_times(read_bundle(options.out / f"{options.precision[0]}-1-{shape}.dist"), steps=LEAST)
        (options.out / f"{options.precision[0]}-limit-{shape}.json").write_text(json.dumps(op_times_json(found)))


CONTENDERS: dict[str, tuple[str, Callable[[argparse.Namespace], None], int]] = {
    "limit": ("limit of the machine, 2 threads", limit, 1),
    "ours-1": ("distir-relax, 1 rank of 2 threads", ours, 1),
    "ours-2": ("distir-relax, 2 ranks", ours, 1),
    "tvm-2": ("distir-relax, 2 ranks, tvm", ours, 1),
    "eager": ("torch eager, 2 threads", eager, 1),
    "compiled": ("torch.compile, 2 threads", compiled_by_torch, 1),
    "dtensor": ("torch DTensor, 2 ranks", dtensor, 2),
}
"""The title of each, its part of this file, and its number of processes under torchrun."""


def main() -> int:
    """Take turns, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--precision", nargs="+", default=["float32", "bf16"])
    parser.add_argument("--shapes", nargs="+", default=["1x128", "8x128", "1x1"])
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        {**{name: run for name, (_, run, _) in CONTENDERS.items()}, "compile": compile_ours}[options.part](options)
        return 0
    found: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for precision in options.precision:
            found[precision] = _turns(options, precision, Path(folder))
            print(_table(precision, options.shapes, found[precision]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


def _turns(options: argparse.Namespace, precision: str, out: Path) -> dict[str, dict[str, Any]]:
    """Return the median milliseconds of each contender by shape, and how much its logits differ."""
    import torch

    part = [__file__, "--layers", str(options.layers), "--precision", precision, "--out", str(out)]
    part += ["--shapes", *options.shapes, "--part"]
    run_part([*part, "compile"], 2)
    print(f"compiled GPT-2, {options.layers} layers, for 2 ranks in {(out / 'compile.json').read_text()} s", flush=True)
    times: dict[str, dict[str, list[float]]] = {name: {shape: [] for shape in options.shapes} for name in options.only}
    errors: dict[str, str] = {}
    for _ in range(options.rounds):
        for name in options.only:
            processes = CONTENDERS[name][2]
            launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", "29561"]
            try:
                run_part([*(launch if processes > 1 else []), *part, name], 2 // processes)
            except RuntimeError as error:
                errors[name] = str(error).strip().splitlines()[-1]
                continue
            for shape in options.shapes:
                read = json.loads((out / f"{precision}-{name}-{shape}.json").read_text())
                times[name][shape] += [read["steps"][0]["limit"]] if name == "limit" else read
    found: dict[str, dict[str, Any]] = {}
    for name in options.only:
        if name in errors:
            found[name] = {"error": errors[name]}
            continue
        # The machine's limit is that of its best moment.
        found[name] = {s: 1e3 * (min if name == "limit" else median)(taken) for s, taken in times[name].items()}
        if name != "limit":
            expected = torch.load(out / f"{options.precision[0]}-eager-{options.shapes[0]}.pt")
            logits = torch.load(out / f"{precision}-{name}-{options.shapes[0]}.pt")
            found[name]["differs"] = float((logits - expected).abs().max())
    return found


def _table(precision: str, shapes: list[str], found: dict[str, dict[str, Any]]) -> str:
    lines = [f"{precision:36}" + "".join(f"{shape:>11}" for shape in shapes) + "    differs by"]
    for name, row in found.items():
        if "error" in row:
            lines.append(f"{CONTENDERS[name][0]:36}{row['error']}")
            continue
        figures = "".join(f"{row[shape]:8.1f} ms" for shape in shapes)
        lines.append(f"{CONTENDERS[name][0]:36}{figures}" + (f"{row['differs']:14.1e}" if "differs" in row else ""))
    return "\n".join(lines)


def run_part(arguments: list[str], threads: int) -> None:
    """Run Python with so many threads. Raises `RuntimeError` with its messages if it fails."""
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads))
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, timeout=1200, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])


if __name__ == "__main__":
    raise SystemExit(main())
