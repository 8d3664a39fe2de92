"""Random models that are trained: drawn layers, loss, optimizer and strategy, compared with torch for three steps.

A model is a sequence of layers from rows of some width to rows of another, each a line of torch over ``x`` (n, w) and
the layer's weights. A number draws a model; one that fails is shrunk to fewer layers that fail too.
"""

from __future__ import annotations

import builtins
import copy
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import distir_relax as dr
from distir_relax.errors import DistIRError, RunError

ROWS = 7
STEPS = 3

# Lines over x, (n, w), which keep its width or change it; {w} is the width, {h} a divisor of it.
# (Not hardsigmoid: the sixth in torch's gradient has the precision of a float32.)
PLAIN = """
torch.tanh(x) ; torch.relu(x) ; F.gelu(x) ; F.gelu(x, approximate='tanh') ; F.silu(x) ; F.softplus(x) ; F.elu(x) ;
F.celu(x) ; F.selu(x) ; F.leaky_relu(x, 0.1) ; F.relu6(x * 3) ; F.hardtanh(x) ; F.hardswish(x) ; F.relu6(x + 3) / 6 ;
F.mish(x) ; F.logsigmoid(x) ; torch.sin(x) ; torch.cos(x) * x ; torch.atan(x) ; torch.exp(-x.square()) ;
(x.abs() + 0.1).sqrt() ; (x.square() + 1).log() ; (x.square() + 0.5).rsqrt() ; x.clamp(-1, 1) ; x.pow(3) * 0.1 ;
x / (1 + x.abs()) ; torch.erf(x) ; torch.log1p(x.abs()) ; torch.expm1(-x.abs()) ; torch.sigmoid(x) * x ;
F.softmax(x, -1) * {w} ; F.log_softmax(x, -1) ; F.layer_norm(x, [{w}]) ; F.normalize(x, dim=-1) ;
x - x.mean(-1, keepdim=True) ; x / (x.std(-1, keepdim=True) + 1) ; x.cumsum(-1) / {w} ; x.flip(-1) - x ;
x.roll(1, -1) * x ; x - x.logsumexp(-1, keepdim=True) ; x.amax(-1, keepdim=True) - x ;
x.max(-1, keepdim=True)[0] * x ; x.norm(dim=-1, keepdim=True) * 0.3 + x ; x.sort(-1, stable=True)[0] ;
F.pad(x, (1, 2)) ; torch.cat([x, torch.tanh(x)], -1) ; x[:, : max({w} // 2, 2)] ; torch.where(x > 0, x, x * 0.3) ;
torch.maximum(x, -x * 0.5) ; torch.minimum(x, x.flip(-1)) ; x.reshape(-1, {h}, {w} // {h}).mT.flatten(1) ;
torch.einsum('nhd,nhe->nhde', *2 * (x.reshape(-1, {h}, {w} // {h}),)).mean((1, 2)) ; x.prod(-1, True).tanh() + x ;
torch.atan2(x, x.square() + 1) ; x.var(-1, keepdim=True) + x ; torch.lerp(x, x.flip(-1), 0.3) ; x.tril() + x ;
F.dropout(x, 0.0) ; x.unbind(-1)[0][:, None] + x ; torch.stack([x, -x], 1).amax(1) ;
x.square().mean(-1, keepdim=True) - x
"""
# Lines with weights: their shapes in parentheses before the line, a and b.
WEIGHTED = """
(5,{w}) (5) F.linear(x, a, b) ; (3,{w}) () F.linear(x, a) ; (8,{w}) (8) torch.tanh(F.linear(x, a, b)) ;
({w}) ({w}) F.layer_norm(x, [{w}], a, b) ; ({w}) () F.rms_norm(x, [{w}], a) ; ({w}) ({w}) x * a + b ;
({w},6) () x @ a ; ({w},4) (4,{w}) x + torch.relu(x @ a) @ b ; (4,1,3) () F.conv1d(x[:, None], a).mean(1) ;
({h},{h}) () torch.einsum('nhd,hk->nkd', x.reshape(-1, {h}, {w} // {h}), a).flatten(1) ;
({w},{w}) ({w},{w}) F.scaled_dot_product_attention(*3 * ((x @ a).reshape(-1, 1, {h}, {w} // {h}),)).flatten(1) @ b ;
({w}) ({w}) F.group_norm(x[..., None], {h}, a, b)[..., 0] ; (9,{w}) () F.softmax(x @ a.t(), -1) @ a ;
({w},5) (5) torch.addmm(b, x, a) ; ({w}) () F.prelu(x, a) ;
({w},2,3) () F.conv_transpose1d(x[..., None], a).flatten(1) ;
(11,{w}) () x + a[(x.detach().abs().sum(-1) * 3.7 + 0.21).long() % 11] ; ({w},{w}) ({w}) F.linear(x, a.t(), b)
"""
LOSSES: dict[str, tuple[Callable[..., Any], bool]] = {
    "mse": (F.mse_loss, False),
    "l1": (F.l1_loss, False),
    "smooth l1": (F.smooth_l1_loss, False),
    "huber sum": (lambda y, t: F.huber_loss(y, t, reduction="sum") / 20, False),
    "cross entropy": (F.cross_entropy, True),
    "smoothed": (lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1), True),
    "binary": (lambda y, t: F.binary_cross_entropy_with_logits(y, torch.sigmoid(t)), False),
    "nll": (lambda y, t: F.nll_loss(F.log_softmax(y, -1), t), True),
    "divergence": (lambda y, t: F.kl_div(F.log_softmax(y, -1), F.softmax(t, -1), reduction="batchmean"), False),
}
OPTIMIZERS: dict[str, tuple[Any, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (dr.optim.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (dr.optim.SGD(lr=0.05, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "adam": (dr.optim.Adam(lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    "adamw": (dr.optim.AdamW(lr=0.01, amsgrad=True), lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True)),
}
STRATEGIES = (
    "1/1/1/1", "3/1/1/1", "1/3/1/1", "2/1/1/2", "1/1/2/2", "1/1/2/3,schedule=zb-h1", "2/1/1/1,zero=1",
    "3/1/1/1,zero=2", "2/1/1/3,zero=3", "1/2/2/2", "5/1/1/1", "1/5/1/1", "1/1/3/4", "1/1/2/2,schedule=zb-v,chunks=2",
    "2/2/1/1", "1/1/1/5", "3/1/1/2,checkpoint=block",
)  # fmt: skip


def _lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.split(" ;")]


KINDS = [*_lines(PLAIN.replace(";\n", " ;\n")), *_lines(WEIGHTED.replace(";\n", " ;\n"))]
"""The layers that are drawn from."""


@dataclass(frozen=True)
class Drawn:
    """A model as text, with its loss, optimizer and strategy by name."""

    seed: int
    layers: tuple[str, ...]
    loss: str
    optimizer: str
    strategy: str
    clip: float | None

    def __str__(self) -> str:
        rest = f"{self.loss}, {self.optimizer}, strategy {self.strategy}, clip_norm {self.clip}"
        return "\n  ".join([f"training {self.seed}: {rest}", *self.layers])


class Layers(nn.Module):
    """Runs the layers of a model, whose weights are made for the widths that they find."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(drawn.seed)
        self.code: list[Any] = []
        x = torch.randn(ROWS, 6, dtype=torch.float64, generator=generator)
        for number, layer in enumerate(drawn.layers):
            width = x.shape[1]
            text = layer.replace("{w}", str(width)).replace("{h}", str(2 if width % 2 == 0 else 1))
            while text.startswith("("):
                shape, _, rest = text[1:].partition(")")
                if not rest.startswith(" "):
                    break
                text = rest[1:]
                sizes = [int(n) for n in shape.split(",") if n]
                letter = "b" if hasattr(self, f"a{number}") else "a"
                if sizes:
                    weight = torch.randn(sizes, dtype=torch.float64, generator=generator) * 0.5
                    setattr(self, f"{letter}{number}", nn.Parameter(weight))
            self.code.append(builtins.compile(text, f"<layer {number}>", "eval"))
            x = self.layer(number, x)

    def layer(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """One layer."""
        own = {letter: getattr(self, f"{letter}{number}", None) for letter in "ab"}
        found: torch.Tensor = eval(self.code[number], {"torch": torch, "F": F, "max": max}, {"x": x, **own})
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(len(self.code)):
            x = self.layer(number, x)
        return x


def draw(seed: int) -> Drawn:
    """The model of a number: three to nine layers, at least two with weights, that torch takes as they are."""
    rng = random.Random(seed)
    weighted, plain = KINDS[-len(_lines(WEIGHTED)) :], KINDS[: -len(_lines(WEIGHTED))]
    while True:
        count = rng.randint(2, 5)
        layers: list[str] = []
        for _ in range(count):
            layers.append(rng.choice(weighted))
            layers += [rng.choice(plain) for _ in range(rng.randint(0, 2))]
        drawn = Drawn(
            seed, tuple(layers), rng.choice(list(LOSSES)), rng.choice(list(OPTIMIZERS)), rng.choice(STRATEGIES),
            rng.choice((None, None, 0.1)),
        )  # fmt: skip
        if _runs(drawn):
            return drawn


def check(drawn: Drawn, rows: Sequence[int] = (ROWS,) * STEPS) -> str:
    """Train a step on each number of rows: ``right``, or ``refused`` by an error of ours.

    If the numbers differ, the batch is symbolic. Raises AssertionError where torch differs.
    """
    model = Layers(drawn)
    batches = [batch for count in rows if (batch := _batch_that_runs(drawn, model, count))]
    x, y = _batch(drawn, model)
    dynamic = {"x": {0: dr.Dim("batch", max=16)}, "targets": {0: "batch"}} if len(set(rows)) > 1 else None
    (ours, theirs), (loss, _) = OPTIMIZERS[drawn.optimizer], LOSSES[drawn.loss]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step = dr.compile_training(
                model, loss, optimizer=ours, example_batch=(x, y), strategy=drawn.strategy, clip_norm=drawn.clip,
                verify=True, dynamic_shapes=dynamic,
            )  # fmt: skip
    except DistIRError:
        return "refused"
    own = copy.deepcopy(model)
    optimizer = theirs(own.parameters())
    run = 0
    for x, y in batches:
        try:
            found = torch.tensor(step(x, y), dtype=torch.float64)
        except RunError:
            # torch.export has fixed that the batch is not 1.
            assert len(x) == 1
            continue
        run += 1
        optimizer.zero_grad()
        expected = loss(own(x), y)
        expected.backward()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-7, atol=1e-9)
        if max(float(p.grad.abs().max()) for p in own.parameters() if p.grad is not None) > 50:
            # Rounding decides about what follows.
            return "right"
        if drawn.clip is not None:
            nn.utils.clip_grad_norm_(own.parameters(), drawn.clip)
        optimizer.step()
    parameters = {name: p.detach() for name, p in own.named_parameters()}
    torch.testing.assert_close(step.parameters(), parameters, rtol=1e-5, atol=1e-7)
    assert run >= len(batches) - 1
    return "right"


def fails(drawn: Drawn) -> str:
    """The error of a model; empty where there is none."""
    try:
        check(drawn)
    except Exception as wrong:
        return f"{type(wrong).__name__}: {wrong}"
    return ""


def shrink(drawn: Drawn) -> Drawn:
    """A model of fewer layers, and of a simpler strategy, that fails too."""
    simpler = [replace(drawn, strategy="1/1/1/1"), replace(drawn, clip=None), replace(drawn, optimizer="sgd")]
    shorter = (replace(drawn, layers=(*drawn.layers[:i], *drawn.layers[i + 1 :])) for i in range(len(drawn.layers)))
    for other in (*simpler, *shorter):
        if other != drawn and _runs(other) and fails(other):
            return shrink(other)
    return drawn


def _batch_that_runs(drawn: Drawn, model: Layers, rows: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    try:
        return _batch(drawn, model, rows)
    except ValueError:
        # Normalization in training takes more than one value per channel.
        assert rows == 1
        return None


def _batch(drawn: Drawn, model: Layers, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(drawn.seed + 1)
    x = torch.randn(rows, 6, dtype=torch.float64, generator=generator)
    width = model(x).shape[1]
    if LOSSES[drawn.loss][1]:
        return x, torch.randint(0, width, (rows,), generator=generator)
    return x, torch.randn(rows, width, dtype=torch.float64, generator=generator)


def _runs(drawn: Drawn) -> bool:
    """Whether torch takes a model, its loss is a number, and its gradients are small."""
    try:
        model = Layers(drawn)
        x, y = _batch(drawn, model)
        loss = LOSSES[drawn.loss][0](model(x), y)
        loss.backward()
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    grads = [p.grad for p in model.parameters()]
    return bool(torch.isfinite(loss) and loss < 50 and grads) and all(
        g is not None and bool(torch.isfinite(g).all()) and float(g.abs().max()) < 50 for g in grads
    )
