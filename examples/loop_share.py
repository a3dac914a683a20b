"""The part of a batch that one of several processes takes: a part of the other loops.

Each process computes the mean loss of its own n of B samples, and the wrapper averages gradients
over processes as if all had the same n. So the mean loss is multiplied by n * processes / B.
"""


def share(u, y, rank, processes):
    """(u, y, factor): every `processes`-th sample of u [T, B, .] and y [B], and n * processes / B.

    rank: of this process, from 0. One process takes the whole batch, with the factor 1.
    """
    mine = slice(rank, None, processes)
    n = len(y[mine])
    return u[:, mine], y[mine], n * processes / len(y)
