"""Engine `cpu`: loops in C, made from the cell's formula by the system's compiler.

engine      the cell's formula as C, and what calls the loops
compiler    finds a compiler, compiles, keeps libraries (and CUDA's kernels) and checks them
vectors.h, loops.h, points.h    the C that every cell shares
"""
