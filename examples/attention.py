"""An encoder-decoder learns to write letters backwards; a plot shows its attention as it writes.

    python examples/attention.py [--task reversal] [--length 8] [--steps 600]
                                 [--seed 0] [--out demo]

Rows are the tokens that the network writes, columns the letters that it has read. Darker cells mean
more attention.
"""

import argparse
from pathlib import Path

import torch

import coadjoint as co


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=("reversal", "sorting"), default="reversal")
    parser.add_argument("--length", type=int, default=8, help="letters of a sequence, at least 2")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the plot")
    args = parser.parse_args()
    torch.set_num_threads(1)  # arrays this small are slower on several
    torch.manual_seed(args.seed)
    try:
        task = co.tasks.make(args.task, length=(2, args.length))
        net = co.EncoderDecoder(
            "gru", inputs=task.inputs, hidden=64, outputs=task.outputs, bidirectional=True
        )
        method, optimiser = co.BPTT(), torch.optim.Adam(net.parameters(), 3e-3)
        for step in range(args.steps):
            method(net, task.batch(step, 32, args.seed), task.loss).write_grad(net)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimiser.step()
        found = co.evaluate(net, task, "test", args.seed)
        print(
            f"{found['right']:.1%} of tokens correct, {found['whole']:.1%} of answers", flush=True
        )
        letters = torch.randperm(task.values, generator=torch.Generator().manual_seed(args.seed))[
            : args.length
        ]
        said = net(torch.eye(task.values)[letters][:, None]).decode(beam=3)
        args.out.mkdir(parents=True, exist_ok=True)
        plot(
            letters.tolist(),
            said.tokens[:, 0].tolist(),
            said.alignment[:, 0],
            task,
            args.out / "alignment.png",
        )
    except (co.CoadjointError, OSError) as error:
        parser.error(str(error))
    print(f"plot: {args.out / 'alignment.png'}")


def plot(read, said, alignment, task, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(4.5, 4.5), constrained_layout=True)
    axes.imshow(alignment, cmap="Blues", vmin=0)
    axes.set_xticks(range(len(read)), read)
    axes.set_yticks(range(len(said)), ["end" if token == task.values else token for token in said])
    axes.set(xlabel="read", ylabel="said", title=f"Where the decoder looks: {task.name}")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
