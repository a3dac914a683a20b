"""WGAN-GP on sequences: an LSTM critic whose gradient by its inputs is held at norm 1.

    python examples/wgan_gp.py [cpu | cuda]

The penalty on that gradient makes the critic's gradient a second derivative through time. On a GPU
torch.nn refuses it: "Double backwards is not supported for CuDNN RNNs due to limitations in the
CuDNN API". Writing co.nn for torch.nn is the whole change.  Gulrajani et al., Improved Training of
Wasserstein GANs (2017)
"""

import sys

import torch

import coadjoint as co

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
T, B, NOISE = 12, 48, 4


def sines():
    """Noisy sine waves of any phase, [T, B, 1]."""
    phase = 6.283 * torch.rand(1, B, 1, device=DEVICE)
    angle = 0.5 * torch.arange(T, device=DEVICE)[:, None, None] + phase
    return angle.sin() + 0.05 * torch.randn(T, B, 1, device=DEVICE)


class Recurrent(torch.nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.rnn, self.out = co.nn.LSTM(inputs, 32), torch.nn.Linear(32, 1)

    def forward(self, u):
        return self.out(self.rnn(u)[0])


def slopes(critic, real, fake):
    """||d critic / du|| of sequences between real and fake ones, the critic averaged over steps."""
    mix = torch.rand(1, B, 1, device=DEVICE)
    u = (mix * real + (1 - mix) * fake).requires_grad_()
    return torch.autograd.grad(critic(u).mean(0).sum(), u, create_graph=True)[0].norm(dim=(0, 2))


torch.manual_seed(0)
critic, generator = Recurrent(1).to(DEVICE), Recurrent(NOISE).to(DEVICE)


def fake():
    return generator(torch.randn(1, B, NOISE, device=DEVICE).expand(T, B, NOISE))


of_critic, of_generator = (
    torch.optim.Adam(m.parameters(), 3e-3, betas=(0.5, 0.9)) for m in (critic, generator)
)
for part in range(1, 7):
    seen = []
    for step in range(150):  # the critic's; the generator makes one for every five
        x, y = sines(), fake().detach()
        distance, norms = (critic(x) - critic(y)).mean(), slopes(critic, x, y)
        of_critic.zero_grad()
        (10 * (norms - 1).square().mean() - distance).backward()
        of_critic.step()
        seen.append((distance.item(), norms.mean().item()))
        if step % 5 == 4:
            of_generator.zero_grad()
            (-critic(fake()).mean()).backward()
            of_generator.step()
    distance, norm = torch.tensor(seen).mean(0)
    print(f"{30 * part} steps: Wasserstein distance {distance:.2f}, gradient norm {norm:.2f}")
