"""The page of coverage: what was tried, what is right, and every refusal by its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from .trial import RANKS, TOLERANCE, Outcome

NOT_COUNTED = ("no example", "no export", "undetermined")
"""Of these a model is neither for nor against the compiler."""

_INTRODUCTION = f"""# Coverage

Which models of other people compile unmodified, measured by `make coverage`
([benchmarks/coverage.py](../benchmarks/coverage.py)). It takes one small configuration, with random weights, of
each family of `torchvision` and `timm` (a file of models) and of `transformers` (a model class of `AutoModel`),
marks four weights spread over the model, compiles it for {RANKS} ranks, and compares every result with eager
torch: right is a difference of at most {TOLERANCE:g}, relative to the largest value or 1; what is not right in
float32 is tried once more in float64, with a remark.

The call is the first that runs in eager torch, fewest kinds of inputs first. Models of text and images that run on
token ids alone, as most vision-language models do (smolvlm, llava_next), are therefore tried **without an image**:
right says nothing of their images ([What works](limitations.md#limits)). Models of transformers that return a cache are
called with `use_cache=False`; without, `torch.export` cannot capture them, and the error says so.

Not counted are families of which no small configuration was found that runs in eager torch (no example), those
that `torch.export` itself cannot capture (no export), and those whose own results in eager torch are others in
float64 than in float32 (undetermined: with random weights they pick the best of equal values, and rounding
decides). They are listed at the end.
"""


def page(outcomes: Iterable[Outcome]) -> str:
    """The Markdown page of these outcomes."""
    ordered = sorted(outcomes, key=lambda o: (o.library, o.family))
    parts = [_INTRODUCTION, _summary(ordered)]
    refused = [o for o in ordered if o.verdict not in ("right", *NOT_COUNTED)]
    parts.append("## Not right\n\n" + _table(refused, "what is said or seen"))
    remarks = [o for o in ordered if o.verdict == "right" and o.reason]
    if remarks:
        parts.append("## Right, with a remark\n\n" + _table(remarks, "remark"))
    for verdict, title in (
        ("undetermined", "Undetermined"),
        ("no export", "No export"),
        ("no example", "No example"),
    ):
        parts.append(f"## {title}\n\n" + _table([o for o in ordered if o.verdict == verdict], "why"))
    for library, found in groupby((o for o in ordered if o.verdict == "right"), lambda o: o.library):
        parts.append(f"## Right: {library}\n\n" + ", ".join(o.family for o in found) + "\n")
    return "\n".join(parts)


def _summary(outcomes: Sequence[Outcome]) -> str:
    rows = [f"| | right | counted | share | {' | '.join(NOT_COUNTED)} |", "|---|---|---|---|---|---|---|"]
    for library, found in groupby(outcomes, lambda o: o.library):
        counts = Counter(o.verdict for o in found)
        counted = sum(n for verdict, n in counts.items() if verdict not in NOT_COUNTED)
        share = counts["right"] / max(1, counted)
        others = " | ".join(str(counts[verdict]) for verdict in NOT_COUNTED)
        rows.append(f"| {library} | {counts['right']} | {counted} | {share:.1%} | {others} |")
    return "\n".join(rows) + "\n"


def _table(outcomes: Sequence[Outcome], title: str) -> str:
    if not outcomes:
        return "None.\n"
    rows = [f"| family | verdict | {title} |", "|---|---|---|"]
    for o in outcomes:
        reason = o.reason.replace("|", "\\|").replace("<", "&lt;")
        rows.append(f"| {o.library} {o.family} | {o.verdict} | {reason[:160]} |")
    return "\n".join(rows) + "\n"
