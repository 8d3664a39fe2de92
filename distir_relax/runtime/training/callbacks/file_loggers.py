"""Logs of a training run in one text file: CSV and JSON lines."""

from __future__ import annotations

import csv
import io
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO, TypeVar

from distir_relax.errors import RunError
from distir_relax.runtime.inputs import check_writable
from distir_relax.runtime.training.callbacks.callback import Callback, RunInfo, StepResult
from distir_relax.runtime.training.callbacks.measurements import evaluation_measurements, step_measurements

Row = dict[str, float]
_Result = TypeVar("_Result")


class FileLogger(Callback):
    """A log with one row for each step and each evaluation, flushed after each row.

    A resumed run continues the file after the rows of the steps before it. Raises RunError if it cannot be written, or
    is not a log.
    """

    def __init__(self, path: str | Path) -> None:
        check_writable(path)
        self.path = Path(path)
        self._file: TextIO | None = None
        self._unit = ""

    def begun(self, run: RunInfo) -> None:
        """See `Callback`."""
        self._unit = run.unit
        resumes = run.step > 0 and self.path.exists()
        self._rewrite([row for row in self._rows() if row["step"] <= run.step] if resumes else [])

    def done(self, result: StepResult) -> None:
        """See `Callback`."""
        self._add({"step": result.step, **step_measurements(result, self._unit)})

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Callback`."""
        self._add({"step": step, **evaluation_measurements(metrics)})

    def close(self) -> None:
        """See `Callback`."""
        file, self._file = self._file, None
        if file is not None:
            # Rows are flushed one by one: what is left is a row whose error was raised.
            with suppress(OSError):
                file.close()

    @abstractmethod
    def _parse(self, text: str) -> list[Row]:
        """Return the rows of a file. Raises ValueError for another file."""

    @abstractmethod
    def _format(self, rows: Sequence[Row]) -> str:
        """Return rows as text."""

    def _add(self, row: Row) -> None:
        """Append a row to the file."""
        self._write(self._format([row]))

    def _rows(self) -> list[Row]:
        text = self._guarded(lambda: self.path.read_text(encoding="utf-8"))
        try:
            return self._parse(text)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RunError(
                "expected the log of the run that is resumed, found another file", str(self.path),
                "give the log another name",
            ) from None  # fmt: skip

    def _rewrite(self, rows: Sequence[Row]) -> None:
        """Replace the file by one of these rows."""
        self.close()
        self._file = self._guarded(lambda: self.path.open("w", encoding="utf-8", newline="", buffering=1))
        self._write(self._format(rows))

    def _write(self, text: str) -> None:
        assert self._file is not None, "the run has begun"
        file = self._file
        self._guarded(lambda: file.write(text))

    def _guarded(self, action: Callable[[], _Result]) -> _Result:
        try:
            return action()
        except (OSError, UnicodeDecodeError) as wrong:
            raise RunError(f"cannot read or write the log: {wrong}", str(self.path)) from None


class CSVLogger(FileLogger):
    """A CSV file with a column for each measurement, empty in rows without it.

    The file is written again, with all rows, when an evaluation adds columns.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._columns: list[str] = []

    def _rewrite(self, rows: Sequence[Row]) -> None:
        self._columns = list(dict.fromkeys(name for row in rows for name in row))
        super()._rewrite(rows)

    def _add(self, row: Row) -> None:
        if set(row) <= set(self._columns):
            super()._add(row)
        else:
            self._rewrite([*self._rows(), row])

    def _parse(self, text: str) -> list[Row]:
        rows = csv.DictReader(io.StringIO(text), strict=True)
        return [{name: _number(value) for name, value in row.items() if value} for row in rows]

    def _format(self, rows: Sequence[Row]) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, lineterminator="\n")
        if self._file is None or self._file.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()


class JSONLogger(FileLogger):
    """JSON lines: an object for each step and each evaluation. NaN and infinity are null."""

    def _parse(self, text: str) -> list[Row]:
        return [json.loads(line) for line in text.splitlines()]

    def _format(self, rows: Sequence[Row]) -> str:
        return "".join(
            json.dumps({k: v if abs(v) < float("inf") else None for k, v in row.items()}) + "\n" for row in rows
        )


def _number(text: str) -> float:
    return int(text) if text.isdigit() else float(text)
