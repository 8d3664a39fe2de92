"""How many architectures of transformers, torchvision and timm compile unmodified, and give eager's numbers on 3 ranks.

    make coverage                                     all of them; writes docs/coverage.md
    python benchmarks/coverage.py timm --only swin    some, with the reasons printed
    python benchmarks/coverage.py tp_plan --keep build/plans.jsonl    by the tensor parallel plans of transformers

Each model runs in a process of its own with a time limit. Outcomes are kept in a file as they come, so that a run that
was stopped goes on where it was; `--again wrong,refused` runs those verdicts anew.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from breadth.page import NOT_COUNTED, page
from breadth.transformers_models import families_with_plans, transformers_families
from breadth.trial import Example, Outcome, try_model
from breadth.vision_models import timm_families, torchvision_families

LIBRARIES: dict[str, Callable[[], Iterator[tuple[str, Callable[[], Example]]]]] = {
    "torchvision": torchvision_families,
    "timm": timm_families,
    "transformers": transformers_families,
    "tp_plan": families_with_plans,
}
_MEMORY = 10 << 30


def run(library: str, family: str, build: Callable[[], Example], limit: float) -> Outcome:
    """One trial in a forked process, which is stopped after `limit` seconds."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_trial, args=(there, library, family, build), daemon=True)
    process.start()
    there.close()
    try:
        outcome: Outcome = here.recv() if here.poll(limit) else Outcome(library, family, "slow", f"over {limit:.0f} s")
    except EOFError:
        process.join()
        outcome = Outcome(library, family, "crashed", f"the process ended with code {process.exitcode}")
    process.kill()
    process.join()
    return outcome


def _trial(there: object, library: str, family: str, build: Callable[[], Example]) -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)
    # A configuration that is not small after all is no example; it must not take the machine with it.
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    there.send(try_model(library, family, build))  # type: ignore[attr-defined]


def summary(outcomes: list[Outcome]) -> str:
    """Per library: how many of those that torch.export takes are right."""
    lines = []
    for library in LIBRARIES:
        counts = Counter(o.verdict for o in outcomes if o.library == library)
        counted = sum(n for verdict, n in counts.items() if verdict not in NOT_COUNTED)
        if counted:
            share = counts["right"] / counted
            lines.append(f"{library}: {counts['right']} of {counted} right ({share:.1%}); {dict(counts)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", default=["torchvision", "timm", "transformers"])
    parser.add_argument("--only", default="", help="families whose name contains one of these, separated by commas")
    parser.add_argument("--again", default="", help="verdicts to run anew, separated by commas; 'all' for all")
    parser.add_argument("--keep", type=Path, default=Path("build/coverage.jsonl"), help="file of outcomes")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds a model may take")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--page", type=Path, help="write the tables to this Markdown file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known: dict[tuple[str, str], Outcome] = {}
    if options.keep.exists():
        for line in options.keep.read_text().splitlines():
            outcome = Outcome(**json.loads(line))
            known[outcome.library, outcome.family] = outcome
    again, only = options.again.split(","), options.only.split(",")
    todo = []
    for library in options.libraries:
        for family, build in LIBRARIES[library]():
            old = known.get((library, family))
            stale = old is None or "all" in again or old.verdict in again
            if any(part in family for part in only) and (stale or options.only):
                todo.append((library, family, build))
    options.keep.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool, options.keep.open("a") as kept:
        for outcome in pool.map(lambda job: run(*job, options.limit), todo):
            known[outcome.library, outcome.family] = outcome
            kept.write(json.dumps(outcome.record()) + "\n")
            kept.flush()
            print(
                f"{outcome.library} {outcome.family}: {outcome.verdict} {outcome.reason} ({outcome.seconds} s)",
                flush=True,
            )
    print(summary(list(known.values())))
    if options.page:
        options.page.write_text(page(list(known.values())))


if __name__ == "__main__":
    main()
