"""Objectives: the mean over samples of weight_j (L_j + rho G_j), which is minimised.

L is the loss of one sample, G a function of its costates, rho the weight of the penalty. This
package imports `sweeps` and the packages above it; a penalty sees Costates and the run they belong
to, never a kind of network.

batch          sequences, targets, lengths, masks and weights of samples
losses         L(a, y) with the output function folded in, and users' own L(y_hat, y)
cross_entropy  -log softmax(a)_y of class numbers, with its slopes
layered        costates of several layers, as penalties see them
penalty_type   Penalty: a function of costates with a name; sums and multiples of them
penalties      G({lam_t}): the penalties that come with the package
log_ratios     the penalty log-ratio as a function of norms, with its slopes
tangents       the tangent loss: how outputs change along directions of the input
state_parts    costates of some slots of the state: dL/dh alone of an LSTM
root_mean_squares  costates per sqrt(n), for layers of different widths
draws          random signs for penalties that draw directions
schedules      a number as a function of the step: rho, or a factor on an optimiser's step size
weights        rho steered by the decay of costates

Example:
    >>> import coadjoint as co
    >>> co.objectives.penalty("variance") is co.penalties.variance
    True
"""

from __future__ import annotations

from .batch import Batch
from .losses import LOSSES, OUTPUTS, Loss
from .penalties import PENALTIES, Penalty, penalty
from .weights import Steered

__all__ = ["LOSSES", "OUTPUTS", "PENALTIES", "Batch", "Loss", "Penalty", "Steered", "penalty"]
