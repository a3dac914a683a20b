"""`coadjoint explain`: its table, its page and its summary."""

import csv
import json
import math
import re

import numpy as np
import pytest

from coadjoint.models import explained_page
from coadjoint.models.explanation import Explained, Explanation

SMALL = "--hidden 4 --steps 2 --batch 4 --probes 2 --quiet --split 1,0,0"


def write_series(path):
    lines = ["who,day,height,load"]
    for name in ("p", "q", "r"):
        lines += [f"{name},{t},{math.sin(t):.4f},{math.cos(t):.4f}" for t in range(12)]
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def figures_in(path):
    """The figures of a page, by their ids."""
    text = path.read_text()
    data = re.search(r'id="page-data">(.*?)</script>', text, re.S).group(1)
    return json.loads(data)["figures"]


def test_sequences(coadjoint, here):
    write_series(here / "train.csv")
    words = f"--train train.csv --id who --time day --kind next --out run {SMALL}"
    assert coadjoint("train", *words.split())[0] == 0
    code, out, err = coadjoint("explain", "run", "train.csv", "--output", "load")
    assert (code, err) == (0, "")
    assert "explains  'load', in its units, at the last step, of 3 sequences" in out
    assert "integrated gradients from the mean of training" in out
    assert "last step" in out
    rows = read("explanation.csv")
    assert len(rows) == 36
    assert list(rows[0])[:4] == ["row", "step", "who", "day"]
    figures = figures_in(here / "explanation.html")
    assert set(figures) == {"by-column", "by-step", "costates", "sample-0", "sample-1", "sample-2"}
    heat = figures["sample-0"]
    assert sorted(heat["bands"]) == ["height", "load"]
    row = heat["cells"][heat["bands"].index("load")]
    assert row == pytest.approx([float(r["attribution load"]) for r in rows[:12]], rel=1e-3)

    code, out, _ = coadjoint("explain", "run", "train.csv", "--out", "-", "--limit", "1")
    assert code == 0
    assert len(out.splitlines()) == 13
    code, _, err = coadjoint("explain", "run", "train.csv", "--out", "train.csv")
    assert code != 0
    assert "Write the explanation to another file" in err
    code, _, err = coadjoint("explain", "run", "train.csv", "--output", "loda", "--force")
    assert code != 0
    assert "did you mean 'load'?" in err


def test_samples(coadjoint, here):
    lines = ["a,b,y"] + [f"{math.sin(t):.3f},{math.cos(t):.3f},{t % 3}" for t in range(30)]
    (here / "train.csv").write_text("\n".join(lines) + "\n")
    words = "--train train.csv --target y --kind classify --chain 4,relu --steps 2 --probes 2"
    words += " --quiet --split 1,0,0 --out run"
    assert coadjoint("train", *words.split())[0] == 0
    words = "--out e.json --page p.html --quantity probability --baseline zero"
    code, out, err = coadjoint("explain", "run", "train.csv", *words.split())
    assert (code, err) == (0, "")
    assert "the probability of the predicted class of 30 samples" in out
    rows = json.loads((here / "e.json").read_text())
    assert len(rows) == 30
    for row in rows:
        total = row["attribution a"] + row["attribution b"]
        assert total == pytest.approx(row["value"] - row["baseline"] + row["gap"], abs=1e-12)
        assert abs(row["gap"]) < 1e-4
    assert set(figures_in(here / "p.html")) == {"by-column", "costates", "samples"}


def test_a_run_of_a_built_in_task_is_refused(coadjoint, here):
    words = "addition --length 10 --hidden 3 --steps 1 --batch 2 --tests 2 --probes 2 --quiet"
    assert coadjoint("train", *words.split(), "--out", "run") == (0, "", "")
    (here / "new.csv").write_text("a\n1\n2\n")
    code, _, err = coadjoint("explain", "run", "new.csv")
    assert code != 0
    assert "not on your own data" in err


def test_names_in_the_page_are_escaped(here):
    sample = Explained(
        name="</script>", id="x", output="<b>", step=None, value=1.0, baseline=0.0, gap=0.0,
        relative_gap=0.0, nodes=16, attributions=np.array([[0.5, 0.5]]),
        costates=np.array([-1.0, -np.inf]), rows=np.array([0]),
    )  # fmt: skip
    found = Explanation(
        "integrated-gradients", "mean", "logit", ["<i>", "b"], [sample], "sequence", here / "d.csv"
    )
    text = explained_page.write_page(found, here / "p.html").read_text()
    assert "<b>" not in text
    assert "<i>" not in text
    assert text.count("</script>") == 2
