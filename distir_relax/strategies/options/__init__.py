"""The strategy options of this package, in the order in which strategies print them.

They are declared apart from their passes, so that the command line starts without importing the compiler.
"""

from distir_relax.strategies.options.activation_checkpointing import Checkpoint
from distir_relax.strategies.options.autosharding import Placements
from distir_relax.strategies.options.context_parallel import ContextParallel, Ring, SplitRows
from distir_relax.strategies.options.expert_parallel import Experts
from distir_relax.strategies.options.pipeline_schedule import Chunks, PipelineSchedule
from distir_relax.strategies.options.sequence_parallel import SequenceParallel
from distir_relax.strategies.options.zero import Zero
from distir_relax.strategies.strategy import register_option

for _option in (
    PipelineSchedule(), Chunks(), Zero(), Checkpoint(), SequenceParallel(), ContextParallel(), Ring(), SplitRows(),
    Experts(), Placements(),
):  # fmt: skip
    register_option(_option)
