"""How the examples of this folder draw their figures: small SVG files, the same at every run."""

import argparse
from pathlib import Path

BLUE, RED, GREY, GREEN = "#2166ac", "#b2182b", "0.55", "#1b7837"


def folder_from(description):
    """The folder for the figure, from the command line."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the figure")
    return parser.parse_args().out


def panels(count, width=4.2, height=3.4):
    """A figure and its axes, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "coadjoint", "font.size": 9})
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    return plt.subplots(1, count, figsize=(width * count, height), constrained_layout=True)


def save(figure, folder, name):
    """Write folder/name.svg, without the date."""
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    # matplotlib leaves blanks at the ends of lines
    lines = [line.rstrip() for line in path.read_text(encoding="utf-8").splitlines()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"figure: {path}")
