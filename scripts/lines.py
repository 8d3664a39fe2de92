"""Lines of each package beside its budget, of ``scripts/lines.toml``: ``python scripts/lines.py``. Exits 1 above it.

Size is a cost: who adds a feature says how many lines it took, and removes the code that it makes superfluous. A
package that shrinks gets a smaller budget.
"""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE, BUDGET = ROOT / "distir_relax", ROOT / "scripts" / "lines.toml"


def main() -> int:
    """Print the table; return 1 if a package has more lines than its budget, or has none."""
    lines, budget = count(PACKAGE), tomllib.loads(BUDGET.read_text())
    for name in sorted({*lines, *budget}, key=lambda name: -lines[name]):
        most = budget.get(name)
        note = "no budget" if most is None else "" if lines[name] <= most else f"{lines[name] - most} over"
        print(f"{lines[name]:>8,} of {most or 0:>7,}  {name:20} {note}".rstrip())
    print(f"{lines.total():>8,} of {sum(budget.values()):>7,}  all")
    over = [name for name, number in lines.items() if number > budget.get(name, 0)]
    if over:
        print(f"over budget: {', '.join(over)}; see {BUDGET.relative_to(ROOT)}", file=sys.stderr)
    return int(bool(over))


def count(folder: Path) -> Counter[str]:
    """Return the lines of Python and C++ files by package; those of modules beside the packages are ``modules``."""
    found = Counter[str]()
    for path in (path for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h")):
        package, *rest = path.relative_to(folder).parts
        found[package if rest else "modules"] += len(path.read_text().splitlines())
    return found


if __name__ == "__main__":
    sys.exit(main())
