"""Native kernels for other processors than this one: compiled or declined, and run where this one can."""

from __future__ import annotations

import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from distir_relax.kernels.isolated_calls import IsolatedCallError, call_isolated
from distir_relax.kernels.native import attend_requests, load, panel_product, target
from distir_relax.kernels.native.load import NativeKernel, Trial, loaded_kernel
from distir_relax.kernels.native.machine_code import load_library
from distir_relax.kernels.native.target import Capability, Target, host_target, target_of_flags
from distir_relax.kernels.native.trials import TRIALS
from tests.kernels import kernels_of_tests

_XEON_FLAGS = (
    "fpu sse sse2 pni ssse3 fma cx16 sse4_1 sse4_2 movbe popcnt aes xsave avx f16c abm bmi1 avx2 bmi2 avx512f "
    "avx512dq avx512ifma avx512cd avx512bw avx512vl avx512vbmi avx512_vbmi2 avx512_vnni avx512_bitalg "
    "avx512_vpopcntdq avx_vnni avx512_bf16 amx_bf16 avx512_fp16 amx_tile amx_int8"
)
XEON_FLAGS = frozenset(_XEON_FLAGS.split())
"""Of a virtual machine whose model number LLVM takes for that of a Rocket Lake."""

X86 = (
    "x86-64", "haswell", "skylake-avx512", "rocketlake", "cascadelake", "sapphirerapids", "znver3", "znver4", "znver5",
)  # fmt: skip
ARM = ("neoverse-n1", "neoverse-v2")
ROCKET_LAKE = "rocketlake with the flags of the Xeon"
NAMES = (*X86, ROCKET_LAKE, *ARM)


def named_target(name: str) -> Target:
    """The target with the features that LLVM ascribes to a processor."""
    import tvm
    from tvm.target import codegen

    if name == ROCKET_LAKE:
        return target_of_flags("x86_64", XEON_FLAGS)
    architecture = "x86_64" if name in X86 else "aarch64"
    described = tvm.target.Target({"kind": "llvm", "mtriple": f"{architecture}-unknown-linux-gnu", "mcpu": name})
    features = frozenset(map(str, codegen.llvm_get_cpu_features(described)))
    return Target(architecture, features).restricted()


def machine_code(kernel: NativeKernel[Any], arguments: tuple[Any, ...], made_for: Target) -> str:
    """The assembly of a kernel."""
    import tvm_ffi

    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ll"
        file.write_text(kernel.compile(arguments, made_for))
        load_library()
        return str(tvm_ffi.load_module(str(file), keep_module_alive=False).inspect_source("asm"))


def check(kernel: NativeKernel[Any], arguments: tuple[Any, ...], made_for: Target) -> str:
    """Compile a kernel, and compare it with torch if this machine runs it; return its assembly, empty if declined."""
    if made_for.missing(kernel.needs(arguments)):
        return ""
    text = call_isolated(machine_code, kernel, arguments, made_for, seconds=100)
    if made_for.architecture == host_target().architecture and made_for.features <= host_target().features:
        call_isolated(load.compile_and_try, kernel, arguments, made_for, seconds=100)
    return text


def compiled_samples(names: tuple[str, ...], trials: tuple[Trial, ...], each: int | None) -> dict[str, set[str]]:
    """The kernels that are compiled for each target, of which equal ones are compiled once.

    `each` is the number of samples of a kernel, None for all; those that need further instructions come on top.
    """
    by_target: dict[Target, set[str]] = {}
    found = {}
    for name in names:
        made_for = named_target(name)
        if made_for not in by_target:
            of_target = by_target[made_for] = set()
            for trial in trials:
                plain = trial.samples[:each]
                for arguments in plain + [
                    s for s in trial.samples if s not in plain and len(trial.kernel.needs(s)) > 1
                ]:
                    if check(trial.kernel, arguments, made_for):
                        of_target.add(trial.kernel.name)
        found[name] = by_target[made_for]
    return found


# Of those whose compilation takes longest, one target each.
LONG = ("attend_requests", "attention_grad", "weight_grad", "quantized_product", "panel_product")


def test_every_kernel_is_compiled_or_declined() -> None:
    """`python -m tests.kernels.targets` compiles all samples for all."""
    short = tuple(trial for trial in TRIALS if trial.kernel.name not in LONG)
    long = tuple(trial for trial in TRIALS if trial.kernel.name in LONG)
    found = compiled_samples(("x86-64", "haswell", "sapphirerapids", "neoverse-v2"), short, 1)
    assert found["x86-64"] == set()
    for name in ("haswell", "sapphirerapids", "neoverse-v2"):
        assert found[name] == {trial.kernel.name for trial in short}
    assert compiled_samples((ROCKET_LAKE,), long, 0)[ROCKET_LAKE] == {
        "attend_requests", "quantized_product", "panel_product",
    }  # fmt: skip


def test_every_kernel_has_a_trial() -> None:
    kernels = {
        name for module in Path(load.__file__).parent.glob("*.py") for line in module.read_text().split("\n@native")[1:]
        if (name := line.partition("def ")[2].partition("(")[0])
    }  # fmt: skip
    assert {trial.kernel.write.__name__ for trial in TRIALS} == kernels - {"native", "native_needing"}
    assert all(trial.kernel.trial is trial for trial in TRIALS)


def test_features_are_those_of_flags_whatever_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM would abort on bfloat16 vectors for the processor that it takes this one to be."""
    xeon = target_of_flags("x86_64", XEON_FLAGS)
    assert all(xeon.can(capability) for capability in Capability)
    assert xeon.to_tvm()["mcpu"] == "x86-64-v3"
    assert "+avx512bf16" in xeon.to_tvm()["mattr"]
    bare = named_target("rocketlake")
    assert not bare.can(Capability.BFLOAT16_DOT)
    assert bare.can(Capability.INT8_DOT)
    assert not target_of_flags("x86_64", []).can(Capability.FMA)
    assert target_of_flags("aarch64", ["asimd"]).can(Capability.FMA)
    assert not target_of_flags("riscv64", ["v"]).can(Capability.FMA)
    assert target_of_flags("riscv64", ["v"]).to_tvm()["mattr"] == []
    monkeypatch.setattr(target, "processor_flags", lambda: XEON_FLAGS)
    monkeypatch.setattr(target.platform, "machine", lambda: "AMD64")
    assert target.host_target.__wrapped__() == xeon


def test_llvm_knows_the_features() -> None:
    import tvm
    from tvm.target import codegen

    xeon = target_of_flags("x86_64", XEON_FLAGS)
    assert xeon.features <= set(map(str, codegen.llvm_get_cpu_features(tvm.target.Target(xeon.to_tvm()))))
    arm = target_of_flags("aarch64", ["asimd", "asimdhp", "asimddp", "atomics", "bf16"])
    assert arm.features <= set(map(str, codegen.llvm_get_cpu_features(tvm.target.Target(arm.to_tvm()))))


@pytest.mark.parametrize("kernel", [panel_product, attend_requests])
def test_instructions_that_a_target_lacks_end_the_child_alone(kernel: NativeKernel[Any]) -> None:
    """The abort of LLVM, as it was for every program in bfloat16."""
    assert kernel.trial is not None
    arguments = next(sample for sample in kernel.trial.samples if Capability.BFLOAT16_DOT in kernel.needs(sample))
    with pytest.raises(IsolatedCallError, match="SIGABRT: LLVM ERROR: "):
        call_isolated(machine_code, kernel, arguments, named_target("haswell"), seconds=100)


def test_a_kernel_that_aborts_is_a_warning_and_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel = NativeKernel(kernels_of_tests.aborting.write, lambda *_: ())
    with pytest.warns(RuntimeWarning, match=r"aborting is not used, but torch: .*SIGABRT: LLVM ERROR: Do not know how"):
        assert kernel(3) is None
    assert "SIGABRT" in kernel.declined[3,]
    again = NativeKernel(kernels_of_tests.aborting.write, lambda *_: ())
    monkeypatch.setattr(load, "call_isolated", lambda *_, **__: pytest.fail("it is tried again"))
    with pytest.warns(RuntimeWarning, match="`distir doctor --measure` tries again"):
        assert again(3) is None
    load.forget_declined()
    with pytest.raises(pytest.fail.Exception, match="it is tried again"):
        NativeKernel(kernels_of_tests.aborting.write, lambda *_: ())(3)


def test_a_kernel_that_hangs_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(load, "_MOST_SECONDS", 0.5)
    with pytest.warns(RuntimeWarning, match=r"no result within 0\.5 s"):
        assert kernels_of_tests.hanging(3) is None


def test_a_kernel_with_a_wrong_result_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from machine code that a processor runs otherwise."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def run(compiled: Any, value: int) -> Any:
        x = torch.empty(5)
        compiled(x.data_ptr(), 5)
        yield x, torch.full((5,), 3.0)

    made = kernels_of_tests.filling
    compiled = loaded_kernel(call_isolated(load.compile_and_try, made, (3,), host_target(), seconds=100), "filling")
    Trial(made, run, []).check(compiled, (3,))
    with pytest.raises(AssertionError, match=r"result 0 differs from torch's by 0\.5"):
        Trial(made, lambda *_: iter([(torch.ones(3), torch.full((3,), 2.0))]), []).check(compiled, (3,))
    with pytest.raises(AssertionError, match="by nan"):
        Trial(made, lambda *_: iter([(torch.full((3,), torch.nan), torch.ones(3))]), []).check(compiled, (3,))

    def differ(*_: Any, **__: Any) -> str:
        raise AssertionError("result 0 differs")

    monkeypatch.setattr(load, "call_isolated", differ)
    with pytest.warns(RuntimeWarning, match="result 0 differs"):
        assert NativeKernel(made.write, lambda *_: ())(5) is None


def test_a_processor_without_instructions_declines_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "host_target", lambda: named_target("haswell"))
    kernel = NativeKernel(panel_product.write, panel_product._needs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel("bfloat16", True, True, True) is None
    assert "AVX512-BF16" in kernel.declined["bfloat16", True, True, True]
