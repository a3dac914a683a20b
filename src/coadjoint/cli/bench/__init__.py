"""`coadjoint bench`: ours against torch.nn, double-backward loops and JAX, in one run.

problems    what is timed, and the contenders
clock       how: by turns, medians
measure     the rows, and how much of what the machine can do they use
tables      results as text, JSON and Markdown
"""
