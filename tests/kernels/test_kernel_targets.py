"""Native kernels for other processors than this one: compiled or declined, and run where this one can."""

from __future__ import annotations

import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from distir_relax.kernels.isolated_calls import call_isolated
from distir_relax.kernels.native import attend_requests, compiler, load, panel_product, target
from distir_relax.kernels.native.compiler import Compiler, CompilerError, host_compiler, zig
from distir_relax.kernels.native.load import NativeKernel, Trial, loaded_kernel
from distir_relax.kernels.native.target import Capability, Target, host_target, target_of_flags
from distir_relax.kernels.native.trials import TRIALS
from distir_relax.runtime.backends.tvm.compile import tvm_target
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


def check(kernel: NativeKernel[Any], arguments: tuple[Any, ...], made_for: Target) -> bool:
    """Compile a kernel, and compare it with torch if this machine runs it; return whether it is not declined.

    The compiler of this machine compiles for its architecture, and that of `ziglang` for others.
    """
    if made_for.missing(kernel.needs(arguments)):
        return False
    is_own = made_for.architecture == host_target().architecture
    made_by = host_compiler() if is_own else zig()
    assert made_by is not None
    if is_own and made_for.features <= host_target().features:
        assert call_isolated(load.compile_and_try, kernel, arguments, made_for, made_by, seconds=100)
        return True
    with TemporaryDirectory() as folder:
        library = Path(folder) / "kernel.so"
        kernel.compile(arguments, made_for, made_by, library)
        machine = {"x86_64": 62, "aarch64": 183}[made_for.architecture]
        assert int.from_bytes(library.read_bytes()[18:20], "little") == machine
    return True


def compiled_samples(names: tuple[str, ...], trials: tuple[Trial, ...], each: int | None) -> dict[str, set[str]]:
    """The kernels that are compiled for each target, of which equal ones are compiled once.

    `each` is the number of samples of a kernel, None for all; those that need further instructions come on top.
    """
    by_target: dict[Target, set[str]] = {}
    found = {}
    for name in names:
        made_for = named_target(name).limited(Capability)
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


def test_every_kernel_is_compiled_or_declined() -> None:
    """`python -m tests.kernels.targets` compiles all samples for all."""
    found = compiled_samples(("x86-64", "haswell"), TRIALS, 1)
    assert found["x86-64"] == set()
    assert found["haswell"] == {trial.kernel.name for trial in TRIALS}
    # Those that need further instructions.
    special = {"attend_requests", "panel_product", "quantized_product"}
    assert compiled_samples(("sapphirerapids",), TRIALS, 0)["sapphirerapids"] == special
    some = tuple(trial for trial in TRIALS if trial.kernel.name in special - {"quantized_product"})
    assert compiled_samples(("neoverse-v2",), some, 1)["neoverse-v2"] == {"attend_requests", "panel_product"}


@pytest.mark.sweep
def test_every_kernel_is_compiled_for_arm() -> None:
    found = compiled_samples(ARM, TRIALS, None)
    assert found["neoverse-n1"] == found["neoverse-v2"] == {trial.kernel.name for trial in TRIALS}


@pytest.mark.parametrize("kernel", [panel_product, attend_requests])
def test_the_compiler_of_the_package_is_as_good(kernel: NativeKernel[Any]) -> None:
    """That of `ziglang`, which needs no other of the system."""
    assert kernel.trial is not None
    assert zig() is not None
    call_isolated(load.compile_and_try, kernel, kernel.trial.samples[0], host_target(), zig(), seconds=100)


def test_every_kernel_has_a_trial() -> None:
    files = {path.stem for path in Path(load.__file__).parent.glob("*.cpp")}
    assert {trial.kernel.name for trial in TRIALS} == files
    assert all(trial.kernel.trial is trial and trial.kernel.source.exists() for trial in TRIALS)


def test_features_are_those_of_flags_whatever_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM would abort on bfloat16 vectors for the processor that it takes this one to be."""
    xeon = target_of_flags("x86_64", XEON_FLAGS)
    assert all(xeon.can(capability) for capability in Capability)
    assert tvm_target(xeon)["mcpu"] == "x86-64-v3"
    assert "+avx512bf16" in tvm_target(xeon)["mattr"]
    bare = named_target("rocketlake")
    assert not bare.can(Capability.BFLOAT16_DOT)
    assert bare.can(Capability.INT8_DOT)
    assert not target_of_flags("x86_64", []).can(Capability.FMA)
    assert target_of_flags("aarch64", ["asimd"]).can(Capability.FMA)
    assert not target_of_flags("riscv64", ["v"]).can(Capability.FMA)
    assert tvm_target(target_of_flags("riscv64", ["v"]))["mattr"] == []
    monkeypatch.setattr(target, "processor_flags", lambda: XEON_FLAGS)
    monkeypatch.setattr(target.platform, "machine", lambda: "AMD64")
    assert target.host_target.__wrapped__() == xeon


def test_llvm_knows_the_features() -> None:
    import tvm
    from tvm.target import codegen

    xeon = target_of_flags("x86_64", XEON_FLAGS)
    assert xeon.features <= set(map(str, codegen.llvm_get_cpu_features(tvm.target.Target(tvm_target(xeon)))))
    arm = target_of_flags("aarch64", ["asimd", "asimdhp", "asimddp", "atomics", "bf16"])
    assert arm.features <= set(map(str, codegen.llvm_get_cpu_features(tvm.target.Target(tvm_target(arm)))))


@pytest.mark.parametrize("kernel", [panel_product, attend_requests])
def test_instructions_that_a_target_lacks_are_an_error(kernel: NativeKernel[Any], tmp_path: Path) -> None:
    assert kernel.trial is not None
    made_by = host_compiler()
    assert made_by is not None
    arguments = next(sample for sample in kernel.trial.samples if Capability.BFLOAT16_DOT in kernel.needs(sample))
    with pytest.raises(CompilerError, match=r"failed: .*error"):
        kernel.compile(arguments, named_target("haswell"), made_by, tmp_path / "kernel.so")


def again_of(kernel: NativeKernel[Any]) -> NativeKernel[Any]:
    """The kernel as another process would have it."""
    return NativeKernel(kernel.declared, kernel._needs, {})


def test_a_kernel_that_aborts_is_a_warning_and_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel = again_of(kernels_of_tests.aborting)
    with pytest.warns(RuntimeWarning, match=r"aborting is not used, but torch: .*SIG(ILL|TRAP): Illegal instruction"):
        assert kernel(3) is None
    assert "Illegal instruction" in kernel.declined[3,]
    again = again_of(kernels_of_tests.aborting)
    monkeypatch.setattr(load, "call_isolated", lambda *_, **__: pytest.fail("it is tried again"))
    with pytest.warns(RuntimeWarning, match="`distir doctor --measure` tries again"):
        assert again(3) is None
    load.forget_declined()
    with pytest.raises(pytest.fail.Exception, match="it is tried again"):
        again_of(kernels_of_tests.aborting)(3)


def test_a_kernel_that_hangs_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(load, "_MOST_SECONDS", 0.5)
    with pytest.warns(RuntimeWarning, match=r"no result within 0\.5 s"):
        assert kernels_of_tests.hanging(3) is None


def test_a_kernel_with_a_wrong_result_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from machine code that a processor runs otherwise."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    made, made_by = kernels_of_tests.filling, host_compiler()
    with pytest.raises(AssertionError, match=r"result 0 differs from torch's by 0\.67"):
        call_isolated(load.compile_and_try, made, (1,), host_target(), made_by, seconds=100)
    content = call_isolated(load.compile_and_try, made, (3,), host_target(), made_by, seconds=100)
    compiled = loaded_kernel(content, "filling")
    Trial(made, kernels_of_tests.expect_threes, []).check(compiled, (3,))
    with pytest.raises(AssertionError, match="by nan"):
        Trial(made, lambda *_: iter([(torch.full((3,), torch.nan), torch.ones(3))]), []).check(compiled, (3,))

    def differ(*_: Any, **__: Any) -> str:
        raise AssertionError("result 0 differs")

    monkeypatch.setattr(load, "call_isolated", differ)
    with pytest.warns(RuntimeWarning, match="result 0 differs"):
        assert again_of(made)(5) is None


def test_a_processor_without_instructions_declines_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "host_target", lambda: named_target("haswell"))
    kernel = again_of(panel_product)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel("bfloat16", True, True) is None
    assert "AVX512-BF16" in kernel.declined["bfloat16", True, True]


def test_without_a_compiler_torch_is_used_and_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(load, "host_compiler", lambda: None)
    with pytest.warns(RuntimeWarning, match=r"no C\+\+ compiler: install .*distir-relax\[native\]"):
        assert again_of(kernels_of_tests.filling)(3) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel = again_of(kernels_of_tests.filling)
        assert kernel(3) is None
    assert "C++ compiler" in kernel.declined[3,]
    # Once there is one, it is used.
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert again_of(kernels_of_tests.filling)(3) is not None


def test_the_compiler_is_that_of_the_system_or_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"c++": "/usr/bin/c++", "clang++": "/opt/clang++", "mine": "/bin/mine"}
    monkeypatch.setattr(compiler.shutil, "which", found.get)
    monkeypatch.delenv("CXX", raising=False)
    assert host_compiler.__wrapped__() == Compiler(("/usr/bin/c++",))
    monkeypatch.setenv("CXX", "mine -B /tools")
    assert host_compiler.__wrapped__() == Compiler(("mine", "-B", "/tools"))
    monkeypatch.setenv("CXX", "absent")
    del found["c++"]
    assert host_compiler.__wrapped__() == Compiler(("/opt/clang++",))
    del found["clang++"]
    assert host_compiler.__wrapped__() == zig()
    monkeypatch.setattr(compiler, "find_spec", lambda _: None)
    assert zig.__wrapped__() is None


@pytest.mark.parametrize("command", ["/bin/false", "/no/such/compiler"])
def test_a_compiler_that_fails_is_an_error(command: str, tmp_path: Path) -> None:
    with pytest.raises(CompilerError, match=command):
        kernels_of_tests.filling.compile((3,), host_target(), Compiler((command,)), tmp_path / "kernel.so")
