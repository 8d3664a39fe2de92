"""Sessions of processes: ranks that a launcher started run calls for the process that launched them.

The driver, the user's process, listens on a Unix socket in a private folder. Each rank connects, loads its program and
its slices of the weights, and then handles requests in order:

    driver                         rank 0                   rank 1
    request 4: call, inputs   ->   runs its program   <->   runs its program
                              <-   reply 4: outputs

Large tensors are in shared memory that the driver owns. It has no name, so that nothing is left of it after a crash.
"""
