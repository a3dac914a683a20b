"""Engine `cpu`: loops in C, made from the cell's formula by the system's compiler.

engine        the three loops, called through ctypes
points        elementwise operations over all rows
row_products  products over rows: what inputs add, and the gradients by weights
per_sample    the loss and the log-ratios of a chain, once for each sample
threads       how many threads share a loop
source        the cell's formula as C
probe         whether these loops are faster here than engine `eager`, measured once
compiler      finds a compiler, compiles, keeps libraries (and CUDA's kernels) and checks them

The C that all cells share is in *.h; source.py says what each file holds.
"""
