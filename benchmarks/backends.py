"""The torch and tvm backends on the same programs: GPT-2 small, two tensor-parallel ranks on MPI, one thread each.

    python benchmarks/backends.py [--alone] [--dtypes float32 bfloat16] [--shapes 1x128 8x128 1x1] [--times 30]

The ranks load both backends, whose steps take turns. Prints medians of all rounds in milliseconds, and the seconds that
a rank takes to load its program: with an empty folder of compiled kernels, and again with that folder.

With ``--alone``, for a machine with other work, prints the processor's time: that of one of the two ranks, whose
collectives get its own values from the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median

os.environ.setdefault("HF_HUB_OFFLINE", "1")

BACKENDS = ("torch", "tvm")
SHARDINGS = {
    "transformer.h.*.attn.c_attn.weight": "S[1]",
    "transformer.h.*.mlp.c_fc.weight": "S[1]",
    "transformer.wte.weight": "S[0]",
}


def save_bundle(dtype: str, shape: tuple[int, int], layers: int, path: Path) -> None:
    """Compile GPT-2 small with random weights for calls of one shape."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import distir_relax as dr

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=layers)).eval().to(getattr(torch, dtype))
    ids = torch.zeros(shape, dtype=torch.int64)
    mesh = dr.DeviceMesh((2,), ("tp",))
    plan = dr.compile(model, (ids,), {"use_cache": False}, shardings=SHARDINGS, mesh=mesh, name="gpt2")
    plan.save(path, backends=BACKENDS)


def run_rank(path: Path, times: int, out: Path) -> None:
    """Load the program of a rank on both backends, and take turns; rank 0 writes the times of the slower rank."""
    import torch

    from distir_relax.bundle import read_bundle
    from distir_relax.runtime.join import joined_world
    from distir_relax.runtime.session import Session

    torch.set_num_threads(1)
    with joined_world(600) as world:
        bundle = read_bundle(path, verify_weights=False)
        ids = torch.randint(0, 40_000, bundle.manifest.inputs[0].shape, generator=torch.Generator().manual_seed(1))
        sessions, loads = {}, {}
        for backend in BACKENDS:
            world.exchange(0)
            start = time.perf_counter()
            sessions[backend] = Session(bundle, backend, world=world, verified=True)
            loads[backend] = time.perf_counter() - start
        inputs = {bundle.manifest.inputs[0].name: ids}
        first = {backend: session(inputs) for backend, session in sessions.items()}
        steps: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        for number in range(times + 2):
            for backend, session in sessions.items():
                session(inputs, outputs=())
                if number >= 2:
                    steps[backend].append(session.seconds)
        numbers = torch.tensor([[loads[backend], *steps[backend]] for backend in BACKENDS])
        slower = sessions["torch"].communicator.all_reduce(numbers, "tp", "max").tolist()
        if world.rank == 0:
            (torch_result,), (tvm_result,) = (first[backend].values() for backend in BACKENDS)
            difference = float((torch_result.float() - tvm_result.float()).abs().max())
            found = {backend: {"load": row[0], "steps": row[1:]} for backend, row in zip(BACKENDS, slower, strict=True)}
            out.write_text(json.dumps({**found, "difference": difference}))


def run_alone(path: Path, times: int, out: Path) -> None:
    """As `run_rank`, for rank 0 without the other, in seconds of the processor."""
    import torch

    from distir_relax.bundle import read_bundle
    from distir_relax.runtime.backends import load_program
    from distir_relax.runtime.progress import Progress, Traffic
    from distir_relax.runtime.transports.threads import ThreadCommunicator, ThreadWorld

    class Alone(ThreadCommunicator):
        def _meet(self, axis: int, value: object) -> list[object]:
            return [value] * self.mesh.shape[axis]

    torch.set_num_threads(1)
    bundle = read_bundle(path, verify_weights=False)
    ids = torch.randint(0, 40_000, bundle.manifest.inputs[0].shape, generator=torch.Generator().manual_seed(1))
    comm = Alone(ThreadWorld(bundle.manifest.mesh), 0)
    comm.local_size, comm.traffic = 2, Traffic()
    programs, loads = {}, {}
    for backend in BACKENDS:
        start = time.process_time()
        programs[backend] = load_program(backend, bundle, 0, comm)
        loads[backend] = time.process_time() - start
    steps: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    results = {}
    for _ in range(times + 2):
        for backend, program in programs.items():
            comm.progress = Progress()
            start = time.thread_time()
            (results[backend],) = program(ids, sizes={})
            steps[backend].append(time.thread_time() - start)
    difference = float((results["torch"].float() - results["tvm"].float()).abs().max())
    found = {backend: {"load": loads[backend], "steps": steps[backend][2:]} for backend in BACKENDS}
    out.write_text(json.dumps({**found, "difference": difference}))


def main() -> None:
    """Print one line per dtype and shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--shapes", nargs="+", default=["1x128", "8x128", "1x1"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2, help="Launches of each program; the first has no kernels yet.")
    parser.add_argument("--alone", action="store_true", help="Time of the processor, of one rank without the other.")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        (run_alone if options.alone else run_rank)(options.part, options.times, options.out)
        return
    print(f"{'':18}{'torch ms':>10}{'tvm ms':>10}{'tvm/torch':>11}{'load tvm s':>14}{'load torch s':>14}  difference")
    for dtype in options.dtypes:
        for shape in options.shapes:
            with tempfile.TemporaryDirectory() as folder:
                rounds = _measure(dtype, shape, options, Path(folder))
            ours, theirs = (median(t for r in rounds for t in r[b]["steps"]) * 1e3 for b in ("tvm", "torch"))
            loads = {b: ", ".join(f"{r[b]['load']:.2f}" for r in rounds[:2]) for b in BACKENDS}
            print(
                f"{dtype:9} {shape:8}{theirs:10.2f}{ours:10.2f}{ours / theirs:11.3f}{loads['tvm']:>14}"
                f"{loads['torch']:>14}  {rounds[0]['difference']:.1e}",
                flush=True,
            )


def _measure(dtype: str, shape: str, options: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    from distir_relax.runtime.launch import find_mpirun, mpirun_command

    batch, sequence = map(int, shape.split("x"))
    bundle, out = folder / "gpt2.dist", folder / "times.json"
    save_bundle(dtype, (batch, sequence), options.layers, bundle)
    part = [sys.executable, __file__, "--part", str(bundle), "--out", str(out), "--times", str(options.times)]
    command = [*part, "--alone"] if options.alone else mpirun_command(find_mpirun(), 2, part, "1")
    environment = dict(os.environ, OMP_NUM_THREADS="1", XDG_CACHE_HOME=str(folder / "cache"))
    rounds = []
    for _ in range(options.rounds):
        subprocess.run(command, env=environment, timeout=600, check=True)
        rounds.append(json.loads(out.read_text()))
    return rounds


if __name__ == "__main__":
    main()
