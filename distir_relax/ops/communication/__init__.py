"""Layout annotations and redistribution, collectives, and point-to-point communication.

Global and sharded stages
    ``annotate_sharding(x) {placements}``   the user's annotation of a value; the value itself is unchanged
    ``redistribute(x) {placements}``        the same global tensor in another layout

Distributed and ranked stages, along a mesh axis of n devices (`sizes` lists a size for each index along it)::

    all_reduce       [a]   [b]     =>  [a+b]  [a+b]
    all_gather       [A]   [B]     =>  [A,B]  [A,B]
    reduce_scatter   [a,b] [c,d]   =>  [a+c]  [b+d]
    all_to_all       [A,B] [C,D]   =>  [A;C]  [B;D]
    resplit          [A,B,C] [D]   =>  [A]    [B,C,D]  between two cuts of one dim: pieces[i][j] go from i to j
    rows_to_groups   [a0,a1] [b0]   =>  [a0,0,b0] [0,a1,0]   rows to the devices that own their groups (0, 1)
    rows_from_groups [a0,-,b0] [-,a1,-] => [a0,a1] [b0]       and back
    shard            [A,B] [A,B]   =>  [A]    [B]       no communication
    shard_start                    =>  0      len(A)    the position of the first element
    slices           [A,B,C]       =>  [A,C]            several ranges of one dim, in the given order
    pad_tail         [A]           =>  [A,0]            local: pads a short shard
    trim_tail        [A,0]         =>  [A]              local: removes the padding

Between devices (each device of the operand's set sends to the one at the same index in the result's set)::

    send             [A]  .        =>  .    [A]         in a rank's program: `send`, or `recv`
"""

# A module enters its ops and their spellings in the table when it is imported.
from distir_relax.ops.communication import (  # noqa: F401
    collectives,
    local_shards,
    padding,
    point_to_point,
    redistribute,
    token_dispatch,
)
