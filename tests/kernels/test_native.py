"""Native kernels beside torch's ops."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from distir_relax.kernels import elementwise
from distir_relax.kernels.elementwise import gelu_multiply, silu_multiply
from distir_relax.kernels.native import MOST_ELEMENTS, is_small, threads_for
from distir_relax.kernels.native import rms_norm as native_rms_norm
from distir_relax.kernels.norms import rms_norm
from distir_relax.kernels.positions import rotary
from tests.kernels import kernels_of_tests
from tests.runtime.processes import interpreter, start

CHECK = """
import sys
import torch
from distir_relax.kernels.native import rms_norm
x, weight = torch.arange(14.0).view(2, 7) - 3, torch.arange(7.0)
result = torch.empty_like(x)
rms_norm("float32", "float32", False)(x.data_ptr(), weight.data_ptr(), result.data_ptr(), 2, 7, 1e-5, 1)
torch.testing.assert_close(result, torch.nn.functional.rms_norm(x, (7,), weight, 1e-5))
print("tvm" in sys.modules)
"""


def run(cache: Path) -> str:
    environment = {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": ":".join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHECK], env=environment, capture_output=True, text=True, timeout=120,
        check=True,
    )  # fmt: skip
    return ran.stdout.strip()


def test_a_compiled_kernel_is_kept_on_disk_and_loads_without_tvm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged file is written again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ("float32", "float32", False)
    assert native_rms_norm._load_locked(arguments) is not None
    (file,) = (tmp_path / "distir-relax" / "kernels").glob("*.so")
    content = file.read_bytes()
    # The file itself is the memory of the code that this process has loaded.
    file.unlink()
    file.write_bytes(content[: len(content) // 2])
    assert native_rms_norm._load_locked(arguments) is not None
    assert len(file.read_bytes()) == len(content)
    inode = file.stat().st_ino
    assert run(tmp_path) == "False"
    assert file.stat().st_ino == inode
    assert list(file.parent.glob("*rms_norm*")) == [file]


THREADS = """
import os
import torch
from distir_relax.kernels.native import panel_product, threads
if {without}:
    threads.openmp_functions = lambda: ()
torch.set_num_threads(3)
torch.ones(1 << 20).exp_()
before = set(os.listdir("/proc/self/task"))
x, w, y = torch.arange(14.0).view(2, 7), torch.ones(5, 7, 64), torch.zeros(2, 320)
panel_product("float32", False, False)(x.data_ptr(), w.data_ptr(), 0, y.data_ptr(), 2, 320, 7, 7, 3)
assert torch.equal(y, x.sum(1, keepdim=True).expand(2, 320))
print(len(before), len(set(os.listdir("/proc/self/task")) - before))
"""


@pytest.mark.drawn(1)
@pytest.mark.parametrize("without", [False, True])
def test_parallel_loops_run_on_the_threads_of_torch_or_in_one(without: bool) -> None:
    environment = {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-W", "error", "-c", THREADS.format(without=without)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    before, started = map(int, ran.stdout.split())
    assert before >= 3
    assert started == 0


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "distir-relax" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert run(tmp_path) == "False"
    assert not list(folder.iterdir())


def test_kernels_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTIR_NATIVE", "0")
    assert kernels_of_tests.unused(3) is None


def test_a_kernel_that_does_not_compile_is_a_warning() -> None:
    with pytest.warns(RuntimeWarning, match="the kernel wrong is not used, but torch: .*no kernel"):
        assert kernels_of_tests.wrong(3) is None


def test_large_tensors_are_left_to_torch() -> None:
    assert is_small(torch.empty(MOST_ELEMENTS))
    assert not is_small(torch.empty(MOST_ELEMENTS + 1))
    assert not is_small(torch.empty(0))
    assert not is_small(torch.empty(1, device="meta"))


@pytest.mark.parametrize("shape", [(127,), (1, 1, 16), (3, 5, 33), (2, 7), (4, 576), (3, 87, 127)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(shape, generator=generator), torch.randn(shape[-1], generator=generator)
    exact = torch.nn.functional.rms_norm(x.double(), (shape[-1],), weight.double(), 1e-3)
    torch.testing.assert_close(rms_norm(x, weight, 1e-3).double(), exact, rtol=1e-6, atol=1e-6)
    strided = torch.stack([x, x], -1)[..., 0]
    assert torch.equal(rms_norm(strided, weight, 1e-3), rms_norm(x, weight, 1e-3))


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounded", [False, True])
def test_rms_norm_of_bfloat16(rounded: bool, weight_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((3, 5, 127), generator=generator).bfloat16()
    weight = torch.randn(127, generator=generator).to(weight_dtype)
    normal = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt()
    exact = (normal.bfloat16().double() if rounded else normal) * weight.double()
    result = rms_norm(x, weight, 1e-3, rounded)
    assert result.dtype == torch.bfloat16
    # Half of a unit in the last place; float32 may round a number that is close to the middle the other way.
    torch.testing.assert_close(result.double(), exact, rtol=2.0**-8 * 1.001 if not rounded else 2.0**-6, atol=0)
    assert (result.double() != exact.bfloat16().double()).double().mean() < 1e-3


def test_bfloat16_is_rounded_to_the_nearest_and_keeps_nan() -> None:
    """Rows of one element, 1 after normalization: the result is the weight, rounded."""
    upper = torch.arange(0x3F80, 0x3F90, dtype=torch.int32)[:, None] << 16
    bits = (upper + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)).flatten()
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3.4e38, 1e-40])
    signalling = torch.tensor([0x7F800001, 0x7FFFFFFF], dtype=torch.int32)
    weight = torch.cat([bits.view(torch.float32), special, signalling.view(torch.float32)])
    for number in weight:
        result = rms_norm(torch.ones(1, dtype=torch.bfloat16), number[None], 0.0)
        torch.testing.assert_close(result, number[None].bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_norms_agree_without_native_kernels(tmp_path: Path) -> None:
    (tmp_path / "norms.py").write_text(
        "import torch; from distir_relax.kernels.norms import rms_norm; torch.manual_seed(0)\n"
        "f, h = torch.float32, torch.bfloat16\n"
        "for a, b in ((f, f), (h, h), (h, f)):\n"
        "    for rounded in (False, True):\n"
        "        x, w = torch.randn(3, 127).to(a), torch.randn(127).to(b)\n"
        "        print(rms_norm(x, w, 1e-3, rounded).double().tolist())\n"
    )
    found = []
    for native_kernels in ("0", "1"):
        ran = start([*interpreter(), str(tmp_path / "norms.py")], DISTIR_NATIVE=native_kernels)
        assert ran.returncode == 0, ran.stderr
        found.append(torch.tensor([json.loads(line) for line in ran.stdout.splitlines()]))
    torch.testing.assert_close(found[0], found[1], rtol=2e-6, atol=1e-6)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The rotation as models spell it out."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("angles", [1, 3])
@pytest.mark.parametrize("width", [2, 34, 64])
def test_rotary(width: int, angles: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    # Five heads of which a larger product has the rows, and the angles of positions 2 to 8.
    x = torch.randn((3, 7, 9, width), generator=generator).to(dtype)[:, :, 2:7].transpose(1, 2)
    angle = torch.randn((angles, 1, 11, width), generator=generator)[:, :, 2:9]
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    result = rotary(x, cos, sin)
    assert result.transpose(1, 2).is_contiguous()
    if dtype == torch.bfloat16:
        assert torch.equal(result, rotated(x, cos, sin))
    exact = rotated(x.double(), cos.double(), sin.double())
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_threads_change_no_bit() -> None:
    """Tensors that are large enough for several threads, beside parts of them that are not."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((1, 521, 127), generator=generator).bfloat16()
    y, weight = x.flip(1), torch.randn(127, generator=generator).bfloat16()
    heads = x[..., :126].view(1, 521, 3, 42).transpose(1, 2)
    angle = torch.randn((1, 1, 521, 42), generator=generator)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    assert threads_for(x) == 3
    assert threads_for(x[:, :100]) == 1
    for begin in range(0, 521, 100):
        rows = slice(begin, begin + 100)
        assert torch.equal(rms_norm(x, weight, 1e-3)[:, rows], rms_norm(x[:, rows], weight, 1e-3))
        part = rotary(heads[:, :, rows], cos[:, :, rows], sin[:, :, rows])
        assert torch.equal(rotary(heads, cos, sin)[:, :, rows], part)
        assert torch.equal(silu_multiply(x, y)[:, rows], silu_multiply(x[:, rows], y[:, rows]))


def test_rotary_of_other_layouts() -> None:
    generator = torch.Generator().manual_seed(0)
    x, angle = (torch.randn((3, 5, 7, 6), generator=generator) for _ in range(2))
    apart = torch.stack([x, x], -1)[..., 0]
    assert torch.equal(rotary(apart, angle.cos(), angle.sin()), rotated(x, angle.cos(), angle.sin()))
    for cos, sin in ((angle[:1, :1].cos(), angle[:, :1].sin()), (angle[:1, :1, :1].cos(), angle[:1, :1, :1].sin())):
        torch.testing.assert_close(rotary(x, cos, sin), rotated(x, cos, sin), rtol=1e-6, atol=1e-6)
    cos, sin = angle[0].cos(), angle[0].sin()
    torch.testing.assert_close(rotary(x[0], cos, sin), rotated(x[0], cos, sin))


ACTIVATIONS = {
    "silu": (elementwise.silu, torch.nn.functional.silu),
    "gelu": (elementwise.gelu, torch.nn.functional.gelu),
    "gelu_tanh": (partial(elementwise.gelu, approximate="tanh"), partial(torch.nn.functional.gelu, approximate="tanh")),
    "silu_grad": (elementwise.silu_grad, lambda x, g: torch.ops.aten.silu_backward(g, x)),
    "gelu_grad": (elementwise.gelu_grad, lambda x, g: torch.ops.aten.gelu_backward(g, x)),
    "gelu_tanh_grad": (
        partial(elementwise.gelu_grad, approximate="tanh"),
        lambda x, g: torch.ops.aten.gelu_backward(g, x, approximate="tanh"),
    ),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_activations_and_their_gradients(name: str, dtype: torch.dtype) -> None:
    computed, reference = ACTIVATIONS[name]
    generator = torch.Generator().manual_seed(0)
    # Halves of rows, other layouts, and few elements, which are left to torch.
    x, g = (torch.randn((3, 101, 254), generator=generator) * 3).to(dtype).split(127, -1)
    x[0, 0, :5] = torch.tensor([30.0, -30.0, 0.0, 300.0, -300.0])
    operands = (x, g) if name.endswith("grad") else (x,)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float64: 1e-12}[dtype]
    for some in (operands, [t.mT for t in operands], [t.contiguous() for t in operands], [t[:1] for t in operands]):
        exact = reference(*(t.double() for t in some))
        found = computed(*some)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=2e-5)
    x[1, 1, 1] = math.nan
    assert computed(*operands).isnan().nonzero().tolist() == [[1, 1, 1]]
    if dtype == torch.float32 and len(operands) == 1:
        # What autograd has to see is torch's.
        assert computed(x.contiguous().requires_grad_()).requires_grad


GATED = {
    "silu": (silu_multiply, torch.nn.functional.silu),
    "gelu": (gelu_multiply, torch.nn.functional.gelu),
    "gelu_tanh": (partial(gelu_multiply, approximate="tanh"), partial(torch.nn.functional.gelu, approximate="tanh")),
}


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gated_activations(name: str, dtype: torch.dtype) -> None:
    computed, activation = GATED[name]
    generator = torch.Generator().manual_seed(0)
    # Halves of the rows of a joined product, and operands that are left to torch.
    x, y = (torch.randn((3, 5, 254), generator=generator) * 4).to(dtype).split(127, -1)
    x[0, 0, :3] = torch.tensor([20.0, -20.0, 0.0])
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float64: 1e-12}[dtype]
    for a, b in ((x, y), (x.mT, y.mT), (x.contiguous(), y)):
        exact = activation(a.double()).to(dtype).double() * b.double()
        found = computed(a, b)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=3e-5)
    x[1, 1, 1] = math.nan
    assert computed(x, y).isnan().nonzero().tolist() == [[1, 1, 1]]
