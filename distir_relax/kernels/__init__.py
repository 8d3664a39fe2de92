"""Kernels that torch lacks, for emitted programs; these import nothing else from this package.

============  ==============================================================================================
`sampling`    formulas of resizing and pooling: elements and weights of each result; also used by the compiler
`resample`    resizing and pooling of a part of a dim
`random`      counter-based random numbers: dropout, uniform, seeds
`recurrent`   recurrences over the steps of a sequence
`routing`     products of rows with the matrices of their groups
`sequence`    tensors that grow along a dim
`packing`     linear layers with prepacked weights
`tvm_extern`  functions written for TVM, or registered with it
`ownership`   moving of values into the function that is called with them
============  ==============================================================================================
"""
