"""A network that writes: characters of a small text, learned and drawn.

`python examples/text.py` writes a text into a temporary folder, trains a GRU on its characters for
some seconds, prints the bits per character beside those of counts, and a sample.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path

import torch

import coadjoint as co

STEPS = 300
WHO = ("the cat", "a small dog", "the old man", "her brother", "the river")
DOES = ("looks for", "waits for", "sings about", "remembers", "follows")
WHAT = ("the moon", "a ship", "the garden", "some bread", "the way home")


def write_book(path: Path) -> None:
    """Write the sentences that can be made of these parts, in an order that looks random."""
    sentences = [" ".join(parts) for parts in itertools.product(WHO, DOES, WHAT)]
    order = [(17 * i * i + 31 * i) % len(sentences) for i in range(4 * len(sentences))]
    path.write_text("".join(f"{sentences[k]}.\n" for k in order), encoding="utf-8")


def main(steps: int = STEPS) -> None:
    """Train and sample."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "book.txt"
        write_book(path)
        task = co.tasks.Data.read(path, kind="next")
    task.cut_training(50)
    torch.manual_seed(0)
    net = co.networks.make(
        "gru",
        inputs=task.inputs,
        outputs=task.outputs,
        hidden=64,
        readout="every",
        output="softmax",
    )
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    method = co.BPTT()
    for step in range(steps):
        method(net, task.batch(step, 16, seed=0), task.loss).write_grad(net)
        optimiser.step()
    print(f"network  {co.evaluate(net, task, 'test')['bits-per-character']:.2f} bits per character")
    for baseline in task.baselines:
        print(f"{baseline.name:8} {baseline.metrics['test']['bits-per-character']:.2f}")
    model = co.Model(net, task)
    print(model.sample("the old ", 80, temperature=0.5, seed=1)[0])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
