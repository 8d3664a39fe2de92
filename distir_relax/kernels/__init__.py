"""What a rank computes that torch lacks: of this package, emitted programs import nothing else.

============  ==============================================================================================
`sampling`    which elements of a dim each one of another is made from: formulas that the compiler reads too
`resample`    resizing and pooling of a part of a dim by those formulas
`random`      random numbers by counter: dropout, uniform, seeds
`recurrent`   recurrences over the steps of a sequence
`routing`     rows that are worked on by the group that each is of
`packing`     linear layers whose weight is laid out once
`tvm_extern`  functions written for TVM, or registered with it
`ownership`   values that are left to the function that is called with them
============  ==============================================================================================
"""
