"""Op semantics: the op table, with one folder per family of ops.

`distir_relax.ops.table` is the machinery; its names are exported here too.
"""

# Each family enters its ops in the table when it is imported.
from distir_relax.ops import (  # noqa: F401
    communication,
    contraction,
    creation,
    elementwise,
    indexing,
    movement,
    normalization,
    optimizer,
    program,
    recurrence,
    reduction,
    spatial,
    spectral,
)
from distir_relax.ops.table import *  # noqa: F403
