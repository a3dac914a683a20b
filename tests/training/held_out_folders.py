"""Run folders with held_out.json: classes, numbers and series as `coadjoint train` leaves them."""

import json

import numpy as np
from test_report import SMALL, write_run

LONG_LABEL = "Fringilla montifringilla subspecies {:02d} (adult, winter plumage)"


def short(values):
    return [None if np.isnan(x) else float(f"{x:.7g}") for x in values]


def kept(ids, lengths, true, predicted, **more):
    """The answers of a split; true, predicted: a column for each output."""
    return {
        "ids": ids,
        "series": [],
        "first": [],
        "lengths": lengths,
        "times": [],
        "true": [short(column) for column in true],
        "predicted": [short(column) for column in predicted],
        "probability": [],
        **more,
    }


def classes(K=4, n=200, seed=0, labels=None, at="last"):
    """The answers of a classifier: each class is mostly recognised, and else its neighbour said."""
    rng = np.random.default_rng(seed)
    true = np.arange(n) % K
    predicted = np.where(rng.random(n) < 0.7, true, (true + 1) % K)
    confusion = []
    for i in range(K):
        for j in range(K):
            count = int(((true == i) & (predicted == j)).sum())
            if count:
                confusion.append([i, j, count])
    T = 4 if at == "every" else 1
    split = {
        "sequences": n // T,
        "targets": n,
        "confusion": confusion,
        "uncounted": 0,
        "errors": [],
        "kept": kept(
            [f"bird {k}" for k in range(n // T)],
            [T] * (n // T),
            [true.astype(float)],
            [predicted.astype(float)],
            probability=[float(f"{p:.3g}") for p in rng.random(n)],
        ),
    }
    return {
        "format": 1,
        "step": 3,
        "kind": "classify",
        "at": at,
        "labels": labels or [f"class {k}" for k in range(K)],
        "outputs": [],
        "splits": {"valid": split, "test": split},
    }


def numbers(outputs=("load",), n=60, seed=0, kind="regress"):
    """The answers of a regression; of kind "next" one long series with dates, in windows of 10."""
    rng = np.random.default_rng(seed)
    true = np.array([np.sin(np.arange(n) / 5 + k) * 10 for k in range(len(outputs))])
    predicted = true + rng.normal(0, 1, true.shape)
    errors = []
    for k in range(len(outputs)):
        error = true[k] - predicted[k]
        rmse = float(np.sqrt(np.square(error).mean()))
        row = {"count": n, "mae": float(np.abs(error).mean()), "rmse": rmse}
        errors.append({**row, "mean": float(error.mean()), "r2": 0.9})
    if kind == "next":
        windows = n // 10
        dates = [f"2020-{1 + k // 28:02d}-{1 + k % 28:02d} 00:00:00" for k in range(n)]
        names = {
            "series": ["all"] * windows,
            "first": [1 + 11 * k for k in range(windows)],
            "times": dates,
        }
        ids = [f"all[{11 * k}:{11 * k + 11}]" for k in range(windows)]
        answers = kept(ids, [10] * windows, true, predicted, **names)
    else:
        answers = kept([f"row {k}" for k in range(n)], [1] * n, true, predicted)
    split = {
        "sequences": len(answers["ids"]),
        "targets": n,
        "confusion": [],
        "uncounted": 0,
        "errors": errors,
        "kept": answers,
    }
    return {
        "format": 1,
        "step": 3,
        "kind": kind,
        "at": "every" if kind == "next" else "last",
        "labels": [],
        "outputs": list(outputs),
        "splits": {"valid": split, "test": split},
    }


def write_answers(folder, answers):
    """A small run folder without a goal, with these answers."""
    write_run(folder, **SMALL, status="finished")
    result = json.loads((folder / "result.json").read_text())
    result |= {"goal": None, "success": False}
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "held_out.json").write_text(json.dumps(answers))
    return folder
