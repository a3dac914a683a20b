"""Engine `cpu`: loops in C, made from the cell's formula by the system's compiler.

engine      the three loops of the engine, and what calls them
compiler    finds a compiler, compiles, keeps libraries and checks them
vectors.h, loops.h, points.h    the C that every cell shares
"""
