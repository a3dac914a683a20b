"""Penalised backpropagation in a LightningModule: two more lines in its training step.

    python examples/loop_lightning.py [steps]          (pip install lightning)

The model, the task and the gradients are those of loop_plain.py.
"""

import logging
import sys
import warnings

import torch
from loop_plain import Reader, batch, told
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import coadjoint as co

try:
    import lightning
except ImportError:
    sys.exit("this example needs Lightning, which is not installed: pip install lightning")


class Penalised(lightning.LightningModule):
    def __init__(self, weight):
        super().__init__()
        self.model, self.weight = Reader(), weight

    def training_step(self, batch):
        u, y = batch
        with co.record(self.model) as tape:  # one line
            loss = cross_entropy(self.model(u), y, reduction="none")
        loss = loss + self.weight * tape.penalty("log-ratio", loss)  # and another
        return loss.mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 2e-3)


def train(steps, weight=2.0):
    torch.manual_seed(0)
    module = Penalised(weight)
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = lightning.Trainer(max_epochs=1, gradient_clip_val=1.0, devices=1, **quiet)
    trainer.fit(module, DataLoader([batch(step) for step in range(steps)], batch_size=None))
    return module.model


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    print(f"penalised: {told(train(int(sys.argv[1]) if len(sys.argv) > 1 else 400).cpu())}")
