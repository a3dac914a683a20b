"""Run folders of chains, as training leaves them, for tests of their pages."""

import json
import math

from test_report import ENVIRONMENT

GREY = {"size": [1, 2, 2], "range": [0.0, 1.0]}
CAPTIONED = {**GREY, "rows": [{"label": "input", "images": [[0, 64, 128, 255]] * 8}]}


def restored(count=8):
    """Pictures of an autoencoder."""
    rows = []
    for k, label in enumerate(("noisy input", "reconstruction", "clean target")):
        rows.append({"label": label, "images": [[k, 64, 128, 255 - i] for i in range(count)]})
    return {**GREY, "rows": rows}


def write_chain(folder, layers=30, steps=60, every=20, pictures=None, config="chain: 64x30"):
    """A run of a chain whose costates vanish at first; two parameters for each map."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for step in range(0, steps + 1, every):
        slope = -0.3 * (1 - step / steps)
        depth = list(range(layers + 1))
        gradients = {}
        for k in range(layers):
            gradients[f"maps.{k}.W"] = 10 ** (slope * (layers - k))
            gradients[f"maps.{k}.b"] = 10 ** (slope * (layers - k) - 1)
        for split in ("valid", "test"):
            held_out = {"split": split, "sequences": 300, "accuracy": step / steps, "loss": 1.0}
            rows.append({"kind": "held-out", "step": step, **held_out})
        rows.append(
            {
                "kind": "probe",
                "step": step,
                "axis": "layer i",
                "t": depth,
                "log10_costates": [slope * (layers - i) for i in depth],
                "temporal": [slope * (layers - i) for i in depth[1:]],
                "decay": slope * layers,
                "radius": None,
                "gradients": gradients,
            }
        )
    for step in range(1, steps + 1):
        row = {"kind": "train", "step": step, "loss": math.exp(-step / 20), "gradient": 1.0}
        rows.append(row | {"penalty": 0.1, "rho": 1.0})
    rows.sort(key=lambda row: row["step"])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = f"task: {{name: digits-flat}}\nnetwork: {{{config}}}\ngradient: {{method: bptt}}\n"
    (folder / "config.yaml").write_text(text)
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    examples = []
    for i in range(8):
        examples.append({"id": str(i), "target": "four", "prediction": "nine", "right": i > 3})
    result = {
        "status": "finished",
        "step": steps,
        "seconds": 3.0,
        "metric": "accuracy",
        "metrics": {"test": {"loss": 0.1, "accuracy": 1.0}},
        "parameters": 100,
        "examples": examples,
    }
    if pictures is not None:
        result["pictures"] = pictures
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def write_chain_comparison(folder):
    """A comparison of two methods on chains of different depths, with two seeds each."""
    rows = []
    for name, layers in (("plain", 30), ("shallow", 10)):
        runs = []
        for seed in range(2):
            path = f"runs/{name}-{seed}"
            write_chain(folder / path, layers=layers)
            runs.append(
                {"seed": seed, "folder": path, "status": "finished", "steps": 60, "metric": 0.5}
            )
        rows.append({"name": name, "settings": {}, "runs": runs})
    data = {"command": "c", "task": "digits-flat", "goal": None, "rows": rows, "metric": "accuracy"}
    (folder / "compare.json").write_text(json.dumps(data | {"seconds": 3.0, "jobs": 1}))
    return folder
