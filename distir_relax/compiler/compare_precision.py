"""Comparison of a model's precisions with float32: `dr.compare_precision`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from distir_relax.compiler.compile import compile_source, default_name, read_model
from distir_relax.compiler.generation import Generation, GenerationSource, read_generation
from distir_relax.compiler.inputs import is_onnx
from distir_relax.compiler.options import CompileOptions, ImportOptions, complete
from distir_relax.compiler.perplexity import WINDOW, bundle_perplexity, default_text, split_windows
from distir_relax.compiler.source import Source
from distir_relax.errors import DistIRError, ImportModelError
from distir_relax.frontends.imported_model import Imported, match_parameters
from distir_relax.runtime.npz import read_npz
from distir_relax.strategies.strategy import Strategy
from distir_relax.support import read_text
from distir_relax.support.precisions import check_precision
from distir_relax.support.units import size
from distir_relax.text import Tokenizer

if TYPE_CHECKING:
    import torch

DEFAULT_PRECISIONS = ("float32", "bf16", "int8", "int4")
_CHARACTERS_PER_TOKEN = 8
"""More than tokens of a text have, so that no more of it than is used becomes tokens."""


@dataclass(frozen=True)
class OutputError:
    """Error of an output against float32: the largest one, and the root mean square relative to that of the output."""

    largest: float
    relative_rms: float


@dataclass(frozen=True)
class PrecisionResult:
    """A model in one precision: bytes of its weights, and its `perplexity` or the error of each output.

    `refused` says why the model has no such form.
    """

    precision: str
    weight_bytes: int = 0
    perplexity: float | None = None
    errors: Mapping[str, OutputError] = field(default_factory=dict)
    refused: str = ""


@dataclass(frozen=True, repr=False)
class PrecisionComparison:
    """Results of `compare_precision`, float32 first. `tokens` is the length of the text, None without one."""

    name: str
    tokens: int | None
    results: tuple[PrecisionResult, ...]

    def __repr__(self) -> str:
        head = f"{self.name}, {'largest and RMS errors' if self.tokens is None else f'{self.tokens:,} tokens of text'}"
        return "\n".join([head, *(f"  {self.line(result)}" for result in self.results)])

    def line(self, result: PrecisionResult) -> str:
        """Return a line about one of the results."""
        if result.refused:
            return f"{result.precision:12}  refused: {result.refused}"
        text = f"{result.precision:12}  {size(result.weight_bytes):>8} of weights"
        if result.perplexity is not None:
            text += f"   perplexity {result.perplexity:.4f}"
            if result is not self.results[0]:
                text += f"   {self.increase(result):+.2%}"
        errors = (f"{name} {e.largest:.2g}, {e.relative_rms:.2%}" for name, e in result.errors.items())
        return "   ".join([text, *errors])

    def increase(self, result: PrecisionResult) -> float:
        """Return by how much the perplexity of a result is larger than that of float32: 0.01 is one percent."""
        exact = self.results[0].perplexity
        assert result.perplexity is not None
        assert exact is not None
        return result.perplexity / exact - 1

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain numbers and lists, for JSON."""
        rows = [asdict(result) for result in self.results]
        for row, result in zip(rows, self.results, strict=True):
            row["increase"] = None if result.perplexity is None else self.increase(result)
        return {"name": self.name, "tokens": self.tokens, "results": rows}


def compare_precision(
    model: Any,
    example_inputs: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    precisions: Sequence[str] = DEFAULT_PRECISIONS,
    text: str | Path | None = None,
    tokens: int = 20_000,
    tokenizer: Any = None,
    inputs: Mapping[str, Any] | str | Path | None = None,
    on_result: Callable[[str], None] | None = None,
    **options: Unpack[ImportOptions],
) -> PrecisionComparison:
    """Compile a model for one device in each of `precisions`, and compare its results with those in float32.

    Of a language model the perplexity is compared: `model` is the path of a folder or a GGUF file, as for
    `compile_generation`, or a module with its `tokenizer`. `text` is the path of a text, by default one that comes with
    Python, of which up to `tokens` tokens are used, in windows of 512.

    Any other model that `compile` takes, with `options` of its import, runs on its example, or on `inputs`: arrays by
    name, or the path of an ``.npz`` file of them; an ONNX file needs these. The error of each output is compared.

    Weights of `keep`, an option of import, stay as they are, as for `compile`. `on_result` is called with a line about
    each result. Raises a `DistIRError`: for an unknown precision, a text or inputs that cannot be read or are too
    short, and as `compile` and `compile_generation` do in float32; in another precision that is a result
    (`PrecisionResult.refused`).
    """
    if "precision" in options:
        raise TypeError("compare_precision takes precisions, a list")
    name, keep = default_name(model), options.pop("keep", ())
    for precision in precisions:
        check_precision(precision, (), name)
    chosen = ("float32", *dict.fromkeys(p for p in precisions if p != "float32"))
    run: _PerplexityRun | _OutputsRun
    if tokenizer is not None or (isinstance(model, (str, Path)) and not is_onnx(model)):
        if inputs is not None or example_inputs or example_kwargs or options:
            raise DistIRError("the perplexity of a language model needs a text, found inputs", name, "leave them out")
        run = _PerplexityRun(model, keep, text, tokens, tokenizer)
    elif text is not None:
        raise DistIRError(
            "a text is for language models", name, "give a folder, a GGUF file, or a module with its tokenizer"
        )
    else:
        run = _OutputsRun(model, (example_inputs, example_kwargs), keep, inputs, options)
    results: list[PrecisionResult] = []
    for precision in chosen:
        try:
            results.append(run(precision))
        except DistIRError as error:
            if precision == "float32":
                raise
            results.append(PrecisionResult(precision, refused=error.message))
        found = PrecisionComparison(name, run.tokens, tuple(results))
        if on_result is not None:
            on_result(found.line(results[-1]))
    return found


class _PerplexityRun:
    """Measures the perplexity of a language model in a precision."""

    def __init__(self, model: Any, keep: Sequence[str], text: str | Path | None, tokens: int, tokenizer: Any) -> None:
        self._model, self._keep, self._tokenizer = model, keep, tokenizer
        self._text = default_text() if text is None else read_text(text, DistIRError)
        self._place = "" if text is None else str(text)
        self._most = tokens
        self._windows: list[Sequence[int]] = []

    @property
    def tokens(self) -> int | None:
        """The number of tokens of the text, in float32's run or later."""
        return sum(map(len, self._windows))

    def __call__(self, precision: str) -> PrecisionResult:
        keep = () if precision == "float32" else self._keep
        source = read_generation(self._model, precision=precision, keep=keep, tokenizer=self._tokenizer)
        if source.encoder is not None:
            raise DistIRError("the perplexity is that of decoder-only models, found an encoder-decoder", source.name)
        if precision == "float32":
            match_parameters(source.imported, self._keep, "keep", source.name)
            self._windows = self._split(source)
        generation: Generation = source.compile(complete(CompileOptions(), source.name))
        found = bundle_perplexity(generation.plan.bundle(("torch",)), self._windows)
        return PrecisionResult(precision, _weight_bytes(source.imported), found)

    def _split(self, source: GenerationSource) -> list[Sequence[int]]:
        tokenizer = Tokenizer.of(source.texts)
        if tokenizer is None:
            raise DistIRError("expected a model with a tokenizer, found none", source.name)
        ids = tokenizer.encode(self._text[: _CHARACTERS_PER_TOKEN * self._most])[: self._most]
        try:
            return split_windows(ids, min(WINDOW, source.max_length))
        except DistIRError as error:
            raise DistIRError(error.message, self._place, error.hint) from None


class _OutputsRun:
    """Runs a model in a precision, and compares its outputs with those of the first run, which is in float32."""

    tokens = None

    def __init__(
        self, model: Any, example: tuple[Sequence[Any], Mapping[str, Any] | None], keep: Sequence[str],
        inputs: Mapping[str, Any] | str | Path | None, options: ImportOptions,
    ) -> None:  # fmt: skip
        self._model, self._example, self._keep, self._options = model, example, keep, options
        self._name = default_name(model)
        self._inputs = read_npz(inputs) if isinstance(inputs, (str, Path)) else inputs
        self._exact: dict[str, torch.Tensor] = {}
        if self._inputs is None and not any(example) and is_onnx(model):
            raise ImportModelError(
                "expected inputs to run the model on, found none", self._name, "give an .npz file of named arrays"
            )

    def __call__(self, precision: str) -> PrecisionResult:
        keep = () if precision == "float32" else self._keep
        options: ImportOptions = {**self._options, "precision": precision, "keep": keep}
        args, kwargs = self._example
        imported = read_model(self._model, args, kwargs, **options)
        if precision == "float32":
            match_parameters(imported, self._keep, "keep", self._name)
        strategy = None if imported.module.meshes else Strategy()
        plan = compile_source(Source(imported, complete(CompileOptions(strategy=strategy), self._name)))
        inputs = self._inputs if self._inputs is not None else imported.flatten(tuple(args), kwargs or {})
        outputs = plan.session()(inputs)
        self._exact = self._exact or outputs
        errors = {} if outputs is self._exact else {n: _error(x, self._exact[n]) for n, x in outputs.items()}
        return PrecisionResult(precision, _weight_bytes(imported), None, errors)


def _weight_bytes(imported: Imported) -> int:
    return sum(item.value.tensor.bytes for item in imported.module.main.inputs if item.role != "input")


def _error(found: torch.Tensor, exact: torch.Tensor) -> OutputError:
    import torch

    found, exact = found.double(), exact.double()
    # Equal infinities differ by nothing.
    difference = torch.where(found == exact, 0, found - exact)
    if not difference.numel():
        return OutputError(0.0, 0.0)
    wrong, whole = difference.norm().item(), exact.norm().item()
    return OutputError(difference.abs().max().item(), wrong / whole if whole else math.inf if wrong else 0.0)
