"""Penalised backpropagation in a LightningModule: two more lines in its training step.

    python examples/loop_lightning.py [steps]          (pip install lightning)
    torchrun --standalone --nproc-per-node 2 examples/loop_lightning.py      (in two processes)

The model, the task and the gradients are those of loop_plain.py. Of every batch each process takes
its share, so that the weights are those of one process.
"""

import logging
import os
import sys
import warnings

import torch
from loop_plain import Reader, batch, told
from loop_share import share
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
        u, y, factor = share(*batch, self.global_rank, self.trainer.world_size)
        with co.record(self.model) as tape:  # one line
            loss = cross_entropy(self.model(u), y, reduction="none")
        loss = loss + self.weight * tape.penalty("log-ratio", loss)  # and another
        return loss.mean() * factor

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 2e-3)


def train(steps, weight=2.0):
    torch.manual_seed(0)
    module = Penalised(weight)
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # as torchrun says
    several = {}
    if processes > 1:
        # Its own sampler would hand out whole batches, and a step would see several of them.
        several = {"accelerator": "cpu", "strategy": "ddp", "use_distributed_sampler": False}
    trainer = lightning.Trainer(
        max_epochs=1, gradient_clip_val=1.0, devices=processes, **quiet, **several
    )
    trainer.fit(module, DataLoader([batch(step) for step in range(steps)], batch_size=None))
    return module.model


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    model = train(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
    if os.environ.get("RANK", "0") == "0":
        print(f"penalised: {told(model.cpu())}")
