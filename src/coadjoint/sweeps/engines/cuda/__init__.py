"""Engine `cuda`: persistent kernels on an NVIDIA GPU, made from the cell's formula by NVRTC.

engine      the three loops, and pointwise operations
source      the kernels' source: the formula, and templates (arguments.cuh, product.cuh, loops.cuh)
points      the source of a pointwise operation
geometry    how a network lies on the chip
driver      compiling, keeping, loading and launching kernels
capture     CUDA graphs: how operations are recorded, and which recordings are kept
repeatable  what a recording depends on beside tensors, and where none is made
captured_stages    a function and its derivatives, one graph for each
captured_function  such functions in torch's graph, for modules and loops of users' own
"""
