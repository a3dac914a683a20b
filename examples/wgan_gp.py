"""WGAN-GP on sequences: an LSTM critic whose gradient by its inputs is held at norm 1.

    python examples/wgan_gp.py [cpu | cuda]

The penalty on that gradient makes the critic's gradient a second derivative through time. On a GPU torch.nn refuses it:
"Double backwards is not supported for CuDNN RNNs due to limitations in the CuDNN API". Writing co.nn for torch.nn is the
whole change.  Gulrajani et al., Improved Training of Wasserstein GANs (2017)
"""

import sys

import torch

import coadjoint as co

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
T, B, NOISE = 16, 64, 4


def sines():
    """Noisy sine waves of any phase, [T, B, 1]."""
    t = torch.arange(T, device=DEVICE)[:, None, None]
    return torch.sin(0.5 * t + 6.283 * torch.rand(1, B, 1, device=DEVICE)) + 0.05 * torch.randn(T, B, 1, device=DEVICE)


class Recurrent(torch.nn.Module):
    """A value for each step; the critic judges by their mean."""

    def __init__(self, inputs):
        super().__init__()
        self.rnn, self.out = co.nn.LSTM(inputs, 32), torch.nn.Linear(32, 1)

    def forward(self, u):
        return self.out(self.rnn(u)[0])


def slopes(critic, real, fake):
    """||d critic / d u|| of each sequence, between real and fake ones."""
    mix = torch.rand(1, B, 1, device=DEVICE)
    u = (mix * real + (1 - mix) * fake).requires_grad_()
    return torch.autograd.grad(critic(u).mean(0).sum(), u, create_graph=True)[0].norm(dim=(0, 2))


torch.manual_seed(0)
critic, generator = Recurrent(1).to(DEVICE), Recurrent(NOISE).to(DEVICE)
fake = lambda: generator(torch.randn(1, B, NOISE, device=DEVICE).expand(T, B, NOISE))
of_critic, of_generator = (torch.optim.Adam(m.parameters(), 3e-3, betas=(0.5, 0.9)) for m in (critic, generator))
for step in range(201):
    for _ in range(3):
        x, y = sines(), fake().detach()
        distance, norms = (critic(x) - critic(y)).mean(), slopes(critic, x, y)
        of_critic.zero_grad()
        (10 * (norms - 1).square().mean() - distance).backward()
        of_critic.step()
    of_generator.zero_grad()
    (-critic(fake()).mean()).backward()
    of_generator.step()
    if step % 50 == 0:
        print(f"step {step}: Wasserstein distance {distance:.2f}, gradient norm {norms.mean():.2f}")
