"""Engine `cpu`: loops in C, made from the cell's formula by the system's compiler.

engine      the three loops, called through ctypes
source      the cell's formula as C
probe       whether these loops are faster here than engine `eager`, measured once
compiler    finds a compiler, compiles, keeps libraries (and CUDA's kernels) and checks them
vectors.h, loops.h, points.h    the C that every cell shares
dense.h     the C of dense layers alone
per_sample  the loss and the log-ratios of a chain, once for each sample (per_sample.h)
"""
