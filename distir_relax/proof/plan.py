"""The proof of a plan: all checks from the model to the ranks' programs, and their result."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from distir_relax.errors import VerificationError
from distir_relax.ir import Module, gc_disabled, inline, verify
from distir_relax.layout import assuming
from distir_relax.ops import check
from distir_relax.proof.model import Unproved, check_model
from distir_relax.proof.projection import check_projection
from distir_relax.proof.schedule import check_schedule
from distir_relax.support.units import count


@dataclass(eq=False)
class Refuted(VerificationError):
    """A `statement` of a proof that does not hold, or cannot be proved."""

    statement: str = ""


@dataclass(slots=True)
class Proof:
    """The result of `prove`: each statement that holds, and the ops that are taken on trust in it.

    `ranks` and `programs` are the numbers of ranks and of distinct programs, `ops` that of the ops of these; `seconds`
    the time of each statement.
    """

    ranks: int
    programs: int
    ops: int = 0
    statements: dict[str, list[Unproved]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def lines(self) -> list[str]:
        """The statements as text, with the number of ops taken on trust."""
        return [f"{statement}{_trusted(ops)}" for statement, ops in self.statements.items()]

    @property
    def summary(self) -> str:
        """The proof in one line."""
        rest = ", its gradients and its microbatches" if TRAINING in self.statements else ""
        trusted = sum(map(len, self.statements.values()))
        condition = f", if {count(trusted, 'op')} are right that cannot be followed" if trusted else ""
        return f"the ranks' programs compute the model{rest}{condition}"

    @contextmanager
    def _proving(self, statement: str, trusted: list[Unproved]) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        except VerificationError as error:
            raise Refuted(error.message, error.where, error.hint, statement) from error
        self.statements[statement] = trusted
        self.seconds[statement] = time.perf_counter() - start


MATCH = "sizes and communication match, and no rank waits forever"
PROJECTION = "each program is its rank's part of the schedule distir.txt"
SCHEDULE = "the schedule computes the sharded program sharded.txt"
MODEL = "the sharded program computes the model model.txt"
TRAINING = f"{MODEL}, its gradients and its microbatches"


def prove(
    ranked: Module,
    distributed: Module,
    sharded: Module | None = None,
    model: Module | None = None,
    verified: bool = False,
) -> Proof:
    """Check a plan; a schedule written by hand has no sharded program. Unless `verified`, verify the programs, too.

    Raises `Refuted` for the first op that is wrong.
    """
    proof = Proof(len(ranked.ranks), len(set(ranked.ranks)))
    with proof._proving(MATCH, []):
        for module in () if verified else (ranked, distributed, sharded):
            if module is not None:
                verify(module, check)
    with gc_disabled(), assuming(ranked.guards):
        distributed, sharded = inline(distributed), None if sharded is None else inline(sharded)
        with proof._proving(PROJECTION, []):
            proof.ops = check_projection(distributed, ranked)
        if sharded is not None:
            with proof._proving(SCHEDULE, []):
                check_schedule(sharded, distributed)
        if sharded is not None and model is not None:
            of_model: list[Unproved] = []
            is_trained = len(sharded.main.inputs) > len(model.main.inputs)
            with proof._proving(TRAINING if is_trained else MODEL, of_model):
                of_model += check_model(model, sharded)
    return proof


def _trusted(ops: list[Unproved]) -> str:
    """Return the limits of a statement: the ops taken on trust."""
    if not ops:
        return ""
    reasons = ", and ".join(dict.fromkeys(item.reason for item in ops))
    return f",\n    if {count(len(ops), 'op')} in it are right, which cannot be followed: {reasons}"
