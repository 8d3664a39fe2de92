"""Results files of searches: a line of JSON per outcome, written as it completes, from which a search resumes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from distir_relax.compiler.source import Source
from distir_relax.cost.profile import Profile
from distir_relax.errors import DistIRError
from distir_relax.ir import print_module
from distir_relax.strategy_search.outcome import Outcome
from distir_relax.strategy_search.search_space import Candidate
from distir_relax.support import parse_json, read_text


def open_results(path: str | Path | None, source: Source, profile: Profile) -> ResultsFile | None:
    """Open the results file of a search for a model on a machine, new or to resume; None without a path.

    Raises `DistIRError` for a file of another kind or another search, and for one that cannot be written.
    """
    if path is None:
        return None
    results = ResultsFile(Path(path), _key(source, profile))
    results.open()
    return results


@dataclass
class ResultsFile:
    """A results file: the outcomes of earlier searches, and new ones as they complete."""

    path: Path
    key: str
    outcomes: dict[Candidate, Outcome] = field(default_factory=dict)
    file: TextIO | None = None

    def open(self) -> None:
        """Read the file. Raises `DistIRError` for a file of another kind, or one that cannot be written."""
        if self.path.exists():
            self._read(read_text(self.path, DistIRError).splitlines())
        try:
            # Drop the partial last line of an interrupted search.
            partial = self.path.with_name(f".{self.path.name}.partial")
            rows = [{"search": self.key}, *(outcome.as_row() for outcome in self.outcomes.values())]
            partial.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            partial.replace(self.path)
            self.file = self.path.open("a")
        except OSError as error:
            message = f"cannot write the results of a search: {error.strerror}"
            raise DistIRError(message, str(self.path)) from None

    def _read(self, lines: Sequence[str]) -> None:
        where = str(self.path)
        for number, line in enumerate(lines):
            if number and number == len(lines) - 1 and not line.endswith("}"):
                break
            row = parse_json(line, DistIRError, f"{where}:{number + 1}")
            if not isinstance(row, dict) or (not number and "search" not in row):
                raise DistIRError("expected the results of a search, found another file", where, "name a new file")
            if number:
                outcome = Outcome.from_row(row, f"{where}:{number + 1}")
                self.outcomes[outcome.candidate] = outcome
            elif row["search"] != self.key:
                message = "expected results of this model and machine, found those of another search"
                raise DistIRError(message, where, "name another file")

    def add(self, outcome: Outcome) -> None:
        """Append an outcome."""
        assert self.file is not None
        self.file.write(json.dumps(outcome.as_row()) + "\n")
        self.file.flush()


def _key(source: Source, profile: Profile) -> str:
    """Return a hash of everything that results depend on, except for candidates."""
    text = json.dumps([print_module(source.imported.module), asdict(profile), str(source.training)], default=str)
    return hashlib.sha256(text.encode()).hexdigest()
