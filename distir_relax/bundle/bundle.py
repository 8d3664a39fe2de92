"""A bundle in memory: what the compiler makes, what a file holds, what a rank runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from distir_relax.bundle.call_signature import CallManifest
from distir_relax.bundle.manifest import Manifest
from distir_relax.bundle.training_manifest import TrainingManifest
from distir_relax.bundle.weights import WeightSource
from distir_relax.errors import BundleError

RECORDS_FILE = "records.json"
STAGE_FILES = {"sharded": "sharded.txt", "distributed": "distir.txt", "ranked": "ranked.txt"}
SEARCH_FILES = ("global.txt", "machine.toml", "search.json")
"""With autosharding: the program before it, the machine, and the query."""
TEXT_FILES = (*STAGE_FILES.values(), RECORDS_FILE, *SEARCH_FILES)


@dataclass(frozen=True, repr=False)
class Bundle:
    """All that ranks need to run a plan.

    `programs` maps the paths that the manifest names to their texts, `texts` the names of the stage files
    (`distir.txt`, `sharded.txt`, `ranked.txt`) and of what passes found (`records.json`) to theirs. `path` is the
    folder the bundle was read from, if any. Raises BundleError when a program of the manifest has no text.
    """

    manifest: Manifest
    programs: Mapping[str, str]
    weights: WeightSource
    texts: Mapping[str, str] = field(default_factory=dict)
    path: Path | None = None

    def __repr__(self) -> str:
        return f"<bundle{f' {self.path}' if self.path is not None else ''}: {self.manifest!r}>"

    def __post_init__(self) -> None:
        for program in self.manifest.programs:
            for path in program.paths:
                if path not in self.programs:
                    raise BundleError(f"the manifest names the program {path!r}, but the bundle does not hold it")

    def for_training(self, training: TrainingManifest) -> Bundle:
        """The bundle as one of a step of training. Raises BundleError for names that the manifest does not have."""
        return replace(self, manifest=replace(self.manifest, training=training))

    def called(self, call: CallManifest) -> Bundle:
        """The bundle as one of a model that is called so."""
        return replace(self, manifest=replace(self.manifest, call=call))

    def with_texts(self, texts: Mapping[str, str]) -> Bundle:
        """The bundle with further texts, by the names of their files."""
        return replace(self, texts={**self.texts, **texts})

    def stage(self, name: str) -> str:
        """The program text at stage `sharded`, `distributed` or `ranked`. Raises BundleError when there is none."""
        if name not in STAGE_FILES:
            raise BundleError(f"unknown stage {name!r}", hint=f"stages: {', '.join(STAGE_FILES)}")
        return self._text(STAGE_FILES[name])

    @property
    def records(self) -> str:
        """What passes found, as JSON: `ir.parse_records` reads it. Raises BundleError when there is none."""
        return self._text(RECORDS_FILE)

    def _text(self, file: str) -> str:
        if file not in self.texts:
            raise BundleError(f"the bundle holds no {file}", str(self.path or self.manifest.name))
        return self.texts[file]
