"""`coadjoint bench`: ours against torch.nn, double-backward loops and JAX, in one run.

clock               timing: contenders take turns, and medians count
problems            the gradients that are timed, and who computes them
mlp                 a deep network, a gradient over layers
subjects            what can be measured, by name
limits              the capacity of the machine, and the least work of a gradient
hessian_free_step   a Hessian-free step and its parts
measure             the options and the rows of a benchmark
tables              results as text, JSON and Markdown
"""
