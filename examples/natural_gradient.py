"""Natural gradients by conjugate gradients: a GRU policy that must remember.

    python examples/natural_gradient.py [cpu | cuda]

A cue is shown at the first of ten steps, followed by noise. The last action is rewarded if it is
the cue. Each step is of bounded divergence. Products with the Fisher matrix are second derivatives
of KL(old || new) through time, which torch.nn refuses on a GPU: "Double backwards is not supported
for CuDNN RNNs due to limitations in the CuDNN API". Writing co.nn for torch.nn is the whole change.
Schulman et al., Trust Region Policy Optimization (2015)
"""

import sys

import torch
from torch.distributions import Categorical, kl_divergence
from torch.nn.utils import vector_to_parameters

import coadjoint as co

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
T, B, CUES, LIMIT = 10, 500, 4, 0.05


def conjugate_gradients(product, g, steps=10):
    """s with product(s) = g."""
    s, r, p = torch.zeros_like(g), g, g
    for _ in range(steps):
        q, size = product(p), r @ r
        a = size / (p @ q)
        s, r = s + a * p, r - a * q
        p = r + (r @ r) / size * p
    return s


torch.manual_seed(0)
rnn, out = co.nn.GRU(CUES, 16).to(DEVICE), torch.nn.Linear(16, CUES).to(DEVICE)


def policy(u):
    return Categorical(logits=out(rnn(u)[0][-1]))


weights = [*rnn.parameters(), *out.parameters()]


def flat(ys):
    return torch.cat([y.reshape(-1) for y in ys])


def gradient(y, **options):
    return flat(torch.autograd.grad(y, weights, **options))


for step in range(26):
    cue, u = torch.randint(CUES, (B,), device=DEVICE), 0.3 * torch.randn(T, B, CUES, device=DEVICE)
    u[0] += torch.eye(CUES, device=DEVICE)[cue]
    pi, start = policy(u), flat(weights).detach()
    action, old = pi.sample(), Categorical(logits=pi.logits.detach())
    reward = (action == cue).float()
    g = gradient((pi.log_prob(action) * (reward - reward.mean())).mean(), retain_graph=True)
    slope = gradient(kl_divergence(old, pi).mean(), create_graph=True)

    def fisher(v, slope=slope):
        return gradient(slope @ v, retain_graph=True) + 1e-3 * v

    s = conjugate_gradients(fisher, g)
    s, kl = s * (2 * LIMIT / (s @ fisher(s))).sqrt(), torch.inf
    while kl > LIMIT:  # s'Fs / 2 is only a model of KL
        vector_to_parameters(start + s, weights)
        kl, s = kl_divergence(old, policy(u)).mean().item(), 0.7 * s
    if step % 5 == 0:
        print(f"step {step}: return {reward.mean():.2f}, KL of the step {kl:.3f}, at most {LIMIT}")
