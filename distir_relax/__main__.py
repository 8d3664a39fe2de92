"""`python -m distir_relax` is `distir`."""

from __future__ import annotations

from distir_relax.cli import main

if __name__ == "__main__":
    main()
