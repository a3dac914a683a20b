"""The costates of a transformer's blocks, before and after a few steps with a penalty and without.

The model is the user's own: a post-norm transformer with a forward of its own, whose residual
branches start too strong, so that every block's normalisation shrinks what goes past them.
co.record(model, at="blocks.*") gives dL/dx_i of every block's output x_i, without a change to the
model. The penalty asks each block to pass them on at their size.

    python examples/record_transformer.py
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import coadjoint as co

TOKENS, WIDTH, BLOCKS, LENGTH, SAMPLES = 16, 32, 8, 8, 32


class Model(nn.Module):
    """Tokens -> logits of the next token after the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList()
        for _ in range(BLOCKS):
            block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True)
            with torch.no_grad():  # residual branches that are too strong
                block.linear2.weight *= 8
                block.self_attn.out_proj.weight *= 4
            self.blocks.append(block)
        self.readout = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, T] tokens -> [B, TOKENS]."""
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x)
        return self.readout(x[:, -1])


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens; the target is the sum of the first two, modulo their number."""
    tokens = torch.randint(TOKENS, (SAMPLES, LENGTH))
    return tokens, (tokens[:, 0] + tokens[:, 1]) % TOKENS


def show(when: str, lam: co.nn.OutputCostates) -> None:
    """Print log ||dL/dx_i||, the mean over samples, for each block."""
    logs = lam.log_norms().detach().mean(1)
    print(f"{when}: loss {lam.loss.mean():.3f}")
    for name, value in zip(lam.names, logs.tolist(), strict=True):
        print(f"  {name:10} log-norm {value:7.3f}")
    print(f"  from the last block to the first: {logs[0] - logs[-1]:+.3f}")


def train(weight: float, steps: int) -> tuple[co.nn.OutputCostates, co.nn.OutputCostates]:
    """Take steps on the loss and weight times the penalty -> costates before and after."""
    torch.manual_seed(0)
    model = Model()
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    seen = []
    for step in range(steps + 1):
        tokens, target = batch()
        with co.record(model, at="blocks.*") as tape:
            logits = model(tokens)
        loss = cross_entropy(logits, target, reduction="none")  # [B], not yet averaged
        lam = tape.costates(loss)
        if step in (0, steps):
            seen.append(lam.detach())
        optimiser.zero_grad()
        (loss + weight * co.penalties.log_ratio(lam)).mean().backward()
        optimiser.step()
    return seen[0], seen[1]


def main(steps: int = 25) -> None:
    """Print the costates at the start, after plain steps, and after steps with the penalty."""
    before, plain = train(0.0, steps)
    _, penalised = train(3.0, steps)
    show("at the start", before)
    show(f"after {steps} plain steps", plain)
    show(f"after {steps} steps with the penalty", penalised)


if __name__ == "__main__":
    main()
