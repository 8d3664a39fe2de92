"""Texts of a language model while it is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from distir_relax.errors import RunError
from distir_relax.runtime.generation.prompt import is_list_of_prompts
from distir_relax.runtime.training.callbacks.callback import Callback

if TYPE_CHECKING:
    import torch


class Generating(Protocol):
    """A compiled language model (`dr.compile_generation`), which takes other weights."""

    def load_parameters(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace weights, by the model's names."""
        ...

    def generate(self, prompt: Any, max_new_tokens: int | None = None, **options: Any) -> Any:
        """Return what follows a prompt."""
        ...


class Samples(Callback):
    """Continue prompts by the weights so far, after each `every` steps.

    `generation` is the model that is trained, compiled by `dr.compile_generation`, with ranks as threads of the first
    process. A `prompt` is a text, tokens, or the messages of a chat; several are a list of them. `options` are those of
    its `generate`, such as ``temperature``. Each text is shown by `show`, and kept in `samples`: pairs of the step and
    the texts. Raises RunError for a number below 1, and for no prompts.
    """

    def __init__(
        self, generation: Generating, prompts: Any, every: int = 100, *, max_new_tokens: int = 64,
        show: Callable[[str], None] = print, **options: Any,
    ) -> None:  # fmt: skip
        if every < 1:
            raise RunError(f"expected every to be 1 or more steps, found {every}", "Samples")
        self.weights_every = every
        self.samples: list[tuple[int, list[Any]]] = []
        self._generation, self._show = generation, show
        self._prompts: Sequence[Any] = prompts if is_list_of_prompts(prompts) else [prompts]
        if prompts == []:
            raise RunError("expected a prompt, found none", "Samples")
        self._options = {"max_new_tokens": max_new_tokens, **options}

    def weights(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        """See `Callback`."""
        self._generation.load_parameters(tensors)
        texts = [self._generation.generate(prompt, **self._options) for prompt in self._prompts]
        self.samples.append((step, texts))
        for text in texts:
            self._show(f"step {step}: {text if isinstance(text, str) else text.tolist()}")
