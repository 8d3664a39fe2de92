"""Fine-tuning of a language model on conversations: from the folder of a model to the folder of another."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from distir_relax.bundle import BundleFile
from distir_relax.checkpoints import read_parameters
from distir_relax.compiler.training import compile_training
from distir_relax.errors import RunError
from distir_relax.frontends.pretrained import (
    LOCAL,
    generating_class,
    generation_settings,
    is_pretrained,
    load_pretrained,
    transformers_library,
)
from distir_relax.frontends.pretrained_language_model import tokenizer_files
from distir_relax.integrations.adapters import adapt, merge
from distir_relax.integrations.chats import ChatRows, read_chats
from distir_relax.optimizers import AdamW
from distir_relax.runtime.handshake import agreed
from distir_relax.runtime.join import joined_world
from distir_relax.runtime.launched import RankOptions, ending_launch
from distir_relax.runtime.training.data_sources import open_data, open_evaluation
from distir_relax.runtime.training.options import EPOCH, TrainOptions
from distir_relax.runtime.training.train import Run, train
from distir_relax.runtime.watchdog import DEFAULT_TIMEOUT
from distir_relax.support.learning_rate import Linear
from distir_relax.text import Tokenizer

if TYPE_CHECKING:
    from distir_relax.runtime.training.callbacks import Callback, Ended
    from distir_relax.runtime.world import World

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in that of the result."""
_STEP = "step.dist"
"""The bundle of the compiled step, in the folder of the result until the end."""
_FULL_RATE, _ADAPTER_RATE = 2e-5, 2e-4


@dataclass(frozen=True)
class FineTuning:
    """Options of `finetune`.

    `epochs` of batches of `batch` rows, of at most `length` tokens each: a conversation, or with `packed` several that
    do not attend to each other. With `rank` low-rank adapters of that rank are trained in place of all weights (Hu et
    al., LoRA, 2021), and merged at the end. `lr` is the largest learning rate, 2e-5, or 2e-4 with adapters, after a
    warm-up over a tenth of the steps and before a linear decay. `strategy` and `precision` are those of
    `compile_training`. The run is evaluated on the file `evaluation`, and checkpoints are written, after each epoch.
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
    packed: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "length"):
            if getattr(self, name) < 1:
                raise RunError(f"expected 1 or more, found {getattr(self, name)}", name)
        if self.rank < 0:
            raise RunError(f"expected a rank of 0 or more, found {self.rank}", "rank")


def finetune(
    model: str | Path, data: str | Path, output: str | Path, options: FineTuning | None = None, *, resume: bool = False,
    callbacks: Sequence[Callback] = (), show: Callable[[str], None] = lambda text: None,
    timeout: float = DEFAULT_TIMEOUT,
) -> Ended:  # fmt: skip
    """Fine-tune the language model of a folder on the conversations of a file, and write the folder `output`.

    `data` has lines of JSON, see `read_chats`; the assistant's messages are learned, as the model's chat template
    writes them. Under mpirun or torchrun this process is a rank: the first one compiles, and writes the result.
    Otherwise ranks are threads. `resume` continues from the last checkpoint in `output`, if there is one. The result is
    a folder of transformers, with the tokenizer, of weights in the dtype of the model's files. `show` receives lines
    about the data, on the first rank. `timeout` is the longest wait of a rank, in seconds.

    Raises a `DistIRError`: for a folder, file or option that does not fit, and as `compile_training` and `train` do.
    """
    task = Task(Path(model), Path(data), Path(output), options or FineTuning(), resume)
    with joined_world(timeout, task.prepare) as world:
        if world.rank == 0:
            show(task.summary)
        return task.train(world, callbacks, timeout=timeout)


@dataclass
class Task:
    """A fine-tuning on the conversations of a file: `prepare`, and then `train`, on every rank."""

    source: Path
    data: Path
    target: Path
    options: FineTuning
    resume: bool = False
    rows: ChatRows = field(init=False)
    _evaluated: ChatRows | None = field(init=False, default=None)

    @property
    def batch(self) -> int:
        """Rows of a step."""
        return min(self.options.batch, len(self.rows))

    @property
    def steps(self) -> int:
        """Steps of all epochs."""
        return self.options.epochs * (len(self.rows) // self.batch)

    @property
    def summary(self) -> str:
        """A line about the data."""
        rows = self.rows
        packed = f" in {len(rows)} rows" if self.options.packed else ""
        cut = f", {rows.cut} of them cut" if rows.cut else ""
        return (
            f"{rows.chats} conversations of up to {rows.length} tokens{packed}{cut}; {self.steps} steps of {self.batch}"
        )

    def prepare(self, world: World) -> None:
        """Read the data, and compile the step on the first rank; the others wait for it.

        Raises a `DistIRError` of any rank on all of them.
        """
        with ending_launch(world), agreed(world):
            self._read()
            if world.rank == 0:
                self._compile()

    def train(
        self, world: World, callbacks: Sequence[Callback], stop: Callable[[], int] = lambda: 0,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> Ended:  # fmt: skip
        """Train as this rank, and write the result on the first one, unless a signal has ended the run."""
        options, evaluated = self.options, self._evaluated
        run = Run(
            BundleFile(self.target / _STEP), lambda manifest, seed, start: open_data(self.rows, manifest, seed, start),
            TrainOptions(
                0, self.target / CHECKPOINTS, EPOCH, 1, "auto" if self.resume else "", options.seed,
                evaluate_every=EPOCH, epochs=options.epochs,
            ),
            callbacks, None if evaluated is None else lambda manifest: open_evaluation(evaluated, manifest),
            RankOptions(timeout=timeout), stop,
        )  # fmt: skip
        ended = train(run, world)
        if world.rank == 0 and not ended.signal:
            self._write()
        return ended

    def _read(self) -> None:
        """Read the conversations, and cut them into tokens."""
        source, options = self.source, self.options
        if not is_pretrained(source):
            raise RunError("expected the folder of a model, with config.json", str(source))
        if not self.resume and self.target.exists() and any(self.target.iterdir()):
            raise RunError("the folder of the result is not empty", str(self.target), "choose another one, or resume")
        chats = read_chats(self.data)
        held_out = None if options.evaluation is None else read_chats(options.evaluation)
        library = transformers_library()
        config = library.AutoConfig.from_pretrained(source, **LOCAL).get_text_config()
        if options.packed and set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
            raise RunError(
                "expected attention to all earlier tokens, which packed rows limit to a conversation; found layers of "
                f"{', '.join(sorted(set(config.layer_types)))}", str(source), "leave out packing",
            )  # fmt: skip
        # The tokens that end a reply are in the settings of its generation.
        like = SimpleNamespace(generation_config=generation_settings(source))
        tokenizer = library.AutoTokenizer.from_pretrained(source, **LOCAL)
        texts = Tokenizer.of(tokenizer_files(tokenizer, like))
        assert texts is not None, "the files are those of a tokenizer"
        length = min(options.length, getattr(config, "max_position_embeddings", None) or options.length)
        self.rows = ChatRows(chats, texts, length, packed=options.packed)
        if held_out is not None:
            self._evaluated = ChatRows(held_out, texts, self.rows.length, packed=options.packed, padded=True)

    def _compile(self) -> None:
        """Compile the step, and write its bundle."""
        options = self.options
        net = self._model()
        net.config.use_cache = False
        net.train()
        rate = options.lr if options.lr is not None else _ADAPTER_RATE if options.rank else _FULL_RATE
        example = torch.utils.data.default_collate([self.rows[0]] * self.batch)
        step = compile_training(
            net, optimizer=AdamW(Linear(rate, self.steps + 1, math.ceil(self.steps / 10)), weight_decay=0.01),
            example_batch=example, clip_norm=1.0, strategy=options.strategy, precision=options.precision,
            seed=options.seed, metrics=None if self._evaluated is None else {},
        )  # fmt: skip
        step.save(self.target / _STEP, ("torch",))

    def _model(self) -> Any:
        """Return the model before the training, in float32, with its adapters."""
        net = load_pretrained(generating_class(self.source), self.source, dtype=torch.float32)
        if self.options.rank:
            torch.manual_seed(self.options.seed)
            adapt(net, self.options.rank)
        return net

    def _write(self) -> None:
        """Write the folder of the trained model, from the last checkpoint."""
        library = transformers_library()
        net = self._model()
        stored = library.AutoConfig.from_pretrained(self.source, **LOCAL).dtype or torch.float32
        trained = read_parameters(self.target / CHECKPOINTS, [name for name, _ in net.named_parameters()])
        unknown = net.load_state_dict(trained.tensors, strict=False).unexpected_keys
        assert not unknown, "the checkpoint has the model's names"
        if self.options.rank:
            merge(net)
        net.to(stored).save_pretrained(self.target)
        library.AutoTokenizer.from_pretrained(self.source, **LOCAL).save_pretrained(self.target)
        shutil.rmtree(self.target / _STEP)
