"""Fine-tuning of a language model on conversations: from the folder of a model to the folder of another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distir_relax.compiler.training import compile_training
from distir_relax.errors import RunError
from distir_relax.frontends.pretrained import generating_class, is_pretrained, load_pretrained, transformers_library
from distir_relax.frontends.pretrained_language_model import tokenizer_files
from distir_relax.integrations.adapters import adapt, merge
from distir_relax.integrations.chats import ChatRows, read_chats
from distir_relax.optimizers import AdamW
from distir_relax.runtime.training.in_process import train
from distir_relax.support.learning_rate import Linear
from distir_relax.text import Tokenizer

if TYPE_CHECKING:
    from distir_relax.runtime.training.callbacks import Callback, Ended

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in that of the result."""
_FULL_RATE, _ADAPTER_RATE = 2e-5, 2e-4


@dataclass(frozen=True)
class FineTuning:
    """Options of `finetune`.

    `epochs` of batches of `batch` conversations, of at most `length` tokens each; with `rank` low-rank adapters of that
    rank are trained in place of all weights (Hu et al., LoRA, 2021), and merged at the end. `lr` is the largest
    learning rate, 2e-5, or 2e-4 with adapters, after a warm-up over a tenth of the steps and before a linear decay.
    `strategy` and `precision` are those of `compile_training`. The run is evaluated on the file `evaluation`, and
    checkpoints are written, after each epoch.
    """

    epochs: int = 3
    batch: int = 8
    length: int = 1024
    rank: int = 0
    lr: float | None = None
    strategy: str = "1/1/1/1"
    precision: str | None = None
    evaluation: str | Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "length"):
            if getattr(self, name) < 1:
                raise RunError(f"expected 1 or more, found {getattr(self, name)}", name)
        if self.rank < 0:
            raise RunError(f"expected a rank of 0 or more, found {self.rank}", "rank")


def finetune(
    model: str | Path, data: str | Path, output: str | Path, options: FineTuning | None = None, *, resume: bool = False,
    callbacks: Sequence[Callback] = (), show: Callable[[str], None] = lambda text: None,
) -> Ended:  # fmt: skip
    """Fine-tune the language model of a folder on the conversations of a file, and write the folder `output`.

    `data` has lines of JSON, see `read_chats`; the assistant's messages are learned, as the model's chat template
    writes them. Ranks are threads of this process. `resume` continues from the last checkpoint in `output`, if there is
    one. The result is a folder of transformers, with the tokenizer, of weights in the dtype of the model's files.
    `show` receives lines about the data.

    Raises a `DistIRError`: for a folder, file or option that does not fit, and as `compile_training` and `train` do.
    """
    options = options or FineTuning()
    source, target = Path(model), Path(output)
    if not is_pretrained(source):
        raise RunError("expected the folder of a model, with config.json", str(source))
    if not resume and target.exists() and any(target.iterdir()):
        raise RunError("the folder of the result is not empty", str(target), "choose another one, or resume")
    chats = read_chats(data)
    held_out = None if options.evaluation is None else read_chats(options.evaluation)
    library = transformers_library()
    tokenizer = library.AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    net = load_pretrained(generating_class(source), source, dtype=torch.float32)
    stored = net.config.dtype or torch.float32
    texts = Tokenizer.of(tokenizer_files(tokenizer, net))
    assert texts is not None, "the files are those of a tokenizer"
    length = min(options.length, getattr(net.config, "max_position_embeddings", None) or options.length)
    rows = ChatRows(chats, texts, length)
    evaluated = None if held_out is None else ChatRows(held_out, texts, rows.length)
    batch = min(options.batch, len(rows))
    steps = options.epochs * (len(rows) // batch)
    show(
        f"{len(rows)} conversations of up to {rows.length} tokens"
        + (f", {rows.cut} of them cut" if rows.cut else "") + f"; {steps} steps of {batch}"
    )  # fmt: skip
    net.config.use_cache = False
    if options.rank:
        torch.manual_seed(options.seed)
        adapt(net, options.rank)
    net.train()
    rate = options.lr if options.lr is not None else _ADAPTER_RATE if options.rank else _FULL_RATE
    example = torch.utils.data.default_collate([rows[0]] * batch)
    step = compile_training(
        net, optimizer=AdamW(Linear(rate, steps + 1, math.ceil(steps / 10)), weight_decay=0.01), example_batch=example,
        clip_norm=1.0, strategy=options.strategy, precision=options.precision, seed=options.seed,
        metrics=None if evaluated is None else {},
    )  # fmt: skip
    evaluation: dict[str, Any] = {} if evaluated is None else {"evaluation": evaluated, "evaluate_every": "epoch"}
    ended = train(
        step, rows, epochs=options.epochs, checkpoint=target / CHECKPOINTS, every="epoch", keep=1, seed=options.seed,
        resume="auto" if resume else "", callbacks=callbacks, **evaluation,
    )  # fmt: skip
    step.copy_to_model(net)
    if options.rank:
        merge(net)
    net.config.use_cache = True
    net.to(stored).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return ended
