"""The report page says things in words: units, labels, and commands that work where it says."""

import json
import shlex
from pathlib import Path

import pytest
from test_report import SMALL, edit, page_of, write_run, write_tasks

import coadjoint as co
from coadjoint.training.report import run_again
from coadjoint.training.report import text as text_module

pytestmark = pytest.mark.slow

DATA = "data: {train: in/load.csv, kind: regress, target: load}\nnetwork: {cell: gru, hidden: 8}\n"
SPLITS = ("train", "valid", "test")


def write_regression(folder, config=DATA):
    """The folder of a run on own data with numbers as targets."""
    write_run(folder, **SMALL, status="finished")
    rows = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "held-out":
            row |= {"mse": 4.0, "mae": 1.5}
            del row["right"]
        rows.append(json.dumps(row))
    (folder / "metrics.jsonl").write_text("\n".join(rows))
    metrics = {}
    for k, split in enumerate(SPLITS):
        metrics[split] = {"loss": 0.125 + k, "mse": 40.5 + k, "mae": 5.25 + k}
    change = {"goal": None, "metric": "mse", "metrics": metrics, "success": False}
    edit(folder / "result.json", lambda result: result.update(change))
    (folder / "config.yaml").write_text(config)
    return folder


@pytest.mark.parametrize(
    ("metric", "label"),
    [
        ("right", "accuracy"),
        ("right_0.2", "accuracy (within 0.2)"),
        ("whole", "whole answers correct"),
        ("accuracy", "accuracy"),
        ("nll_2", "nll_2"),
        ("a\u202eb", "a\\u202eb"),
    ],
)
def test_metrics_have_labels(metric, label):
    assert text_module.shown_metric(metric) == label


@pytest.mark.parametrize(
    ("goal", "parsed"),
    [
        ("right_0.2 >= 0.99", ("right_0.2", 0.99, "accuracy (within 0.2) ≥ 0.99")),
        ("mse <= 2", ("mse", 2.0, "mse ≤ 2")),
    ],
)
def test_goals_are_said_in_words(goal, parsed):
    assert text_module.parse_goal(goal) == parsed


def test_right_is_no_label(tmp_path):
    text = page_of(write_run(tmp_path / "one", **SMALL)).text
    assert "Test accuracy" in text
    assert "target prediction correct note" in text
    assert " right " not in text
    assert " right" not in page_of(write_tasks(tmp_path / "several")).text


def test_the_page_of_a_regression_shows_the_test_set_and_the_unit_of_the_loss(tmp_path):
    page = page_of(write_regression(tmp_path))
    for words in (
        "load.csv, regress, target load · gru, 8 units",
        "valid mse 41.5",
        "test mse 42.5",
        "test mae 7.25",
        "test loss, standardised units 2.125",
        "metric train valid test loss, standardised units 0.125 1.125 2.125 mse 40.5 41.5 42.5",
        "in standardised units: the targets have mean 0 and standard deviation 1",
    ):
        assert words in page.text, words


def test_a_loss_in_the_units_of_the_data_is_not_called_standardised(tmp_path):
    config = DATA.replace("target:", "standardise: false, target:")
    text = page_of(write_regression(tmp_path / "raw", config)).text
    assert "standardised" not in text
    assert "standardised" not in page_of(write_run(tmp_path / "task", **SMALL)).text


@pytest.mark.parametrize(
    ("command", "folder", "path"),
    [
        ("coadjoint train xor", "/a/runs/xor-1", "runs/xor-1"),
        ("coadjoint train xor", "/a/moved/xor-1", ""),
        ("coadjoint train xor -o some/run -q", "/a/some/run", "some/run"),
        ("coadjoint train xor -o some/run -q", "/a/other/run", ""),
        ("coadjoint train xor --out=../run", "/a/run", "../run"),
        ("coadjoint online x.csv --out 'a b'", "/a/a b", "a b"),
        ("coadjoint train xor -o .", "/a/run", ""),
        ("coadjoint train xor -o", "/a/run", ""),
        ("coadjoint resume runs/xor-1", "/a/runs/xor-1", ""),
        ("python train.py", "/a/runs/xor-1", ""),
        ("coadjoint train 'xor", "/a/runs/xor-1", ""),
        ("", "/a/runs/xor-1", ""),
    ],
)
def test_a_run_is_resumed_where_its_command_was_run(tmp_path, command, folder, path):
    """path: "" if the command does not tell, so that the folder above is the place."""
    folder = tmp_path / folder.removeprefix("/")
    place, found = run_again.standing_place(command, folder)
    assert found == (path or folder.name)
    assert place == (
        "from the folder in which that command was run"
        if path
        else f"from the folder that holds {folder.name}"
    )


@pytest.mark.parametrize(
    ("command", "folder", "place"),
    [
        ("coadjoint train xor", "/a/runs/xor-1", "/a"),
        ("coadjoint train xor -o b/c", "/a/b/c", "/a"),
        ("coadjoint train xor -o ../c", "/a/c", None),
        ("coadjoint train xor -o /a/b/c", "/a/b/c", None),
        ("coadjoint train xor -o b/c", "/a/moved/c", None),
        ("python train.py", "/a/b", None),
    ],
)
def test_the_folder_in_which_a_run_was_started(command, folder, place):
    found = run_again.starting_folder(command, Path(folder))
    assert found == (None if place is None else Path(place))


@pytest.mark.parametrize(
    ("status", "steps", "what"),
    [
        ("finished", " --steps 6", "Train longer, here to twice the steps"),
        ("interrupted", "", "Resume from the last checkpoint"),
        ("failed", "", "Resume from the last checkpoint"),
    ],
)
def test_a_finished_run_continues_with_more_steps(tmp_path, status, steps, what):
    folder = write_run(tmp_path / "one run", **SMALL, status=status)
    text = page_of(folder).text
    assert f"{what} (from the folder that holds one run)" in text
    resume = f"coadjoint resume {shlex.quote('one run')}"
    assert f"{resume}{steps} Point at" in text
    (folder / "config.yaml").unlink()
    assert "co.train(..., " in page_of(folder).text
    assert "folder='one run', resume=True)" in page_of(folder).text


@pytest.mark.parametrize("status", ["success", "early-stopped"])
def test_a_run_without_a_step_left_has_no_command_to_resume(tmp_path, status):
    text = page_of(write_run(tmp_path, **SMALL, status=status)).text
    assert "there is nothing left to resume." in text
    assert "coadjoint resume" not in text


def test_the_command_on_the_page_of_a_finished_run_works(tmp_path, monkeypatch):
    """From where the page says, for data that is named from there."""
    from typer.testing import CliRunner

    from coadjoint.cli import app

    monkeypatch.chdir(tmp_path)
    rows = ["id,x,y"]
    for k in range(60):
        rows.append(f"{k // 6},{k % 7},{k // 6 % 4 + 0.5}")
    (tmp_path / "load.csv").write_text("\n".join(rows))
    train = "train --train load.csv --id id --target y --kind regress --steps 2 --hidden 3 -q"
    monkeypatch.setattr("sys.argv", ["coadjoint", *train.split()])
    assert CliRunner().invoke(app, train.split()).exit_code == 0
    text = page_of(tmp_path / "runs/load-1").text
    command = "resume runs/load-1 --steps 4"
    place = "from the folder in which that command was run; from another one, name the run folder"
    assert f"({place} by its whole path) coadjoint {command}" in text
    assert CliRunner().invoke(app, [*command.split(), "-q"]).exit_code == 0
    result = json.loads((tmp_path / "runs/load-1/result.json").read_text())
    assert result["step"] == 4
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    elsewhere = ["resume", str(tmp_path / "runs/load-1"), "--steps", "5"]
    done = CliRunner().invoke(app, elsewhere)
    assert done.exit_code == 0
    assert f"load.csv is not here: changing to {tmp_path}" in done.output.replace("\n", "")
    assert json.loads((tmp_path / "runs/load-1/result.json").read_text())["step"] == 5


def test_a_spectral_radius_that_was_not_recorded_is_left_out(tmp_path):
    write_run(tmp_path, **SMALL)
    assert "Spectral radius" in page_of(tmp_path).text
    rows = co.report.read_rows(tmp_path / "metrics.jsonl")
    for row in rows:
        row["radius"] = None
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert "pectral radius" not in page_of(tmp_path).text


def test_figures_explain_their_letters_and_units(tmp_path):
    page = page_of(write_run(tmp_path, **SMALL))
    assert "W: state to state; R: input to state; b: bias of the state; V: state" in page.text
    assert "log₁₀ of a ratio" in page.text
    assert page.figures["decay"]["y"]["label"] == "log₁₀ (‖λ₀‖ / ‖λ_T‖)"
    assert page.figures["rate"]["y"]["label"] == "learning rate"
    assert "adam, learning rate 0.001" in page.text
    assert "tep size" not in page.text


def test_a_comparison_says_what_it_counts(tmp_path):
    text = page_of(write_tasks(tmp_path)).text
    for words in (
        "xor, 12 steps: runs that succeeded 4 of 4",
        "Errors run outcome reason",
        "Median over the seeds, with the range in brackets where seeds differ. Steps and time",
        "addition, 20 steps: plain cell=gru, seed 0 finished, goal not reached",
        "digits: plain cell=gru, seed 0 finished 100",
        "final accuracy (within 0.2)",
    ):
        assert words in text, words


def test_a_comparison_of_single_runs_has_no_range(tmp_path):
    def keep_first(data):
        data["rows"] = data["rows"][:2]
        for row in data["rows"]:
            row["runs"] = row["runs"][:1]

    write_tasks(tmp_path)
    edit(tmp_path / "compare.json", keep_first)
    text = page_of(tmp_path).text
    assert "One run in each row. Steps and time cover only" in text
    assert "brackets" not in text
    assert "Errors" not in text


def test_a_comparison_without_a_goal_speaks_of_no_success(tmp_path):
    run = {"status": "finished", "success": False, "steps": 5, "seconds": 2.0, "split": "valid"}
    runs = [{**run, "seed": k, "folder": f"runs/{k}", "metric": 0.5 + k / 4} for k in range(3)]
    failed = {**run, "seed": 3, "folder": "runs/3", "status": "failed", "metric": None}
    rows = [
        {"name": "gru", "runs": runs},
        {"name": "elman", "runs": [*runs[:1], failed]},
    ]
    about = {"task": "birds", "metric": "accuracy", "goal": None, "rows": rows}
    (tmp_path / "compare.json").write_text(json.dumps(about))
    text = page_of(tmp_path).text
    for words in ("goal", "succe"):
        assert words not in text, words
    assert "gru: valid accuracy 0.75 elman: valid accuracy 0.5, 1 failed" in text
    assert "name runs time final valid accuracy gru 3 2 s 0.75 (0.5 to 1)" in text
    assert "elman 1 of 2 ended, 1 failed 2 s 0.5" in text


def test_the_end_of_pretraining_is_marked(tmp_path):
    folder = write_run(tmp_path, **SMALL)
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("weight: 4.0", "weight: 4.0, pretrain: 2"))
    marks = page_of(folder).figures["loss"]["marks"]
    assert marks[0] == {"x": 2, "label": "end of pretraining"}
    assert marks[1]["label"] == "success"


def test_the_ids_of_a_page_are_unique(tmp_path):
    """A section called data must not be taken for what the script draws."""
    folder = write_run(tmp_path, **SMALL)
    (folder / "data.json").write_text(json.dumps({"lines": [["rows", "5"]]}))
    ids = [value for name, value in page_of(folder).attributes if name == "id"]
    assert "data" in ids
    assert len(ids) == len(set(ids))


def test_the_layers_of_a_chain_are_named(tmp_path):
    layers = ["input", "dense 64 tanh", "dense 64 tanh", "dense 3"]
    folder = write_run(tmp_path, **SMALL)
    edit(folder / "result.json", lambda result: result.update(layers=layers))
    text = page_of(folder).text
    assert "Layers: 0 input; 1 to 2 dense 64 tanh; 3 dense 3." in text
    chart = {"title": "Costates", "about": "", "x": "layer i", "y": "norm"}
    chart["curves"] = [["lam", [0, 1, 2, 3], [1, 2, 3, 4]]]
    about = {"layers": layers, "weights": "weights after training"}
    found = {"about": about, "table": {}, "charts": [chart]}
    (folder / "diagnostics").mkdir()
    (folder / "diagnostics/diagnostics.json").write_text(json.dumps(found))
    page = page_of(folder)
    assert page.figures["diagnostic-0"]["names"] == layers
    assert "weights after training. Layers: 0 input" in page.text
