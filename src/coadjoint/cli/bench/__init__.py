"""`coadjoint bench`: ours against torch.nn, double-backward loops, JAX and FlashRNN, in one run.

clock               timing: contenders take turns, and medians count
flashrnn_kernels    FlashRNN's kernels, if they are installed
problems            the gradients that are timed, and who computes them
mlp                 a deep network, a gradient over layers
subjects            what can be measured, by name
limits              the capacity of the machine, and the least work of a gradient
hessian_free_step   a Hessian-free step and its parts
goals               rows with a limit, and how they are measured
user_loops          costates and gradient penalties in loops of a user's own
one_step            modules and cells called step by step
training_step       a step of `coadjoint train`
options             what is measured, where and how
measure             the gradients of a benchmark, row by row
tables              results as text, JSON and Markdown
"""
