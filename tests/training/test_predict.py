"""load_model and predict do in Python what `coadjoint predict` does on the command line."""

import csv
import re
import shutil

import pytest
import torch
import typer

from coadjoint.cli import app
from coadjoint.errors import DataError, KindError, StorageError
from coadjoint.training.predict import load_model, predict
from paths import DATA

FOLDERS = DATA / "folders-0.6.1"


def silent(message):
    """Models before 0.6.1 carry no sum."""


def test_a_folder_and_its_model_are_the_same_network():
    net, description = load_model(FOLDERS / "data", silent)
    again, _ = load_model(str(FOLDERS / "data" / "model.safetensors"), silent)
    assert not net.training
    assert description["data"]
    assert all(torch.equal(p, again.state_dict()[key]) for key, p in net.state_dict().items())


def test_predictions_from_python_are_those_of_the_command_line(tmp_path, coadjoint):
    ours, theirs = tmp_path / "ours.csv", tmp_path / "theirs.csv"
    count, notes = predict(FOLDERS / "data", FOLDERS / "train.csv", ours, silent)
    code, out, _ = coadjoint(
        "predict", str(FOLDERS / "data"), str(FOLDERS / "train.csv"), "--out", str(theirs)
    )
    assert code == 0
    assert ours.read_bytes() == theirs.read_bytes()
    assert out.splitlines() == [*notes, f"{count} sequences -> {theirs}"]
    assert count == len(list(csv.DictReader(ours.open())))


def test_a_link_that_is_named_is_followed(tmp_path):
    (tmp_path / "link").symlink_to(FOLDERS / "data" / "model.safetensors")
    assert load_model(tmp_path / "link", silent)[1] == load_model(FOLDERS / "data", silent)[1]


def test_a_file_that_holds_no_model_is_refused_in_one_line(tmp_path):
    shutil.copytree(FOLDERS / "data", tmp_path / "unfinished")
    (tmp_path / "unfinished" / "model.safetensors").unlink()
    (tmp_path / "empty").mkdir()
    says = {
        "missing": "missing does not exist. Name a run folder, or a model.safetensors.",
        "unfinished": (
            "unfinished has not finished: there is no model yet. Resume with: coadjoint resume "
        ),
        "empty": "empty is not a run folder: it holds no model.safetensors.",
    }
    for name, words in says.items():
        with pytest.raises(StorageError) as error:
            load_model(tmp_path / name)
        assert words in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(KindError, match="run must be the name of a file or folder"):
        load_model(None)


def test_a_run_of_a_task_has_no_file_to_predict_for(tmp_path):
    with pytest.raises(DataError, match="not on files, so it cannot predict from a file"):
        predict(FOLDERS / "run", FOLDERS / "train.csv", tmp_path / "out.csv", silent)
    assert not (tmp_path / "out.csv").exists()


HEADER = "id,u,v,class\n"
UNREADABLE = {
    "blank": (HEADER + "s,1,2,\ns,,3,\n",
        "Fill them in, or pass --missing drop|ffill."),
    "column": (HEADER + "s,1,,\ns,2,,\n",
        "every value is missing. Fill it in: the model needs it."),
    "word": (HEADER + "s,1,x,\n",
        '"x" is not a number. Fix the value, or leave the cell blank and pass --missing drop|'),
    "comma": (HEADER + 's,1,"0,5",\n',
        "has a decimal comma. Pass --decimal ','."),
    "digits": (HEADER + "s,1,9007199254740993,\n", "Scale it in both files."),
    "separator": ("id;u;v\ns;1;2\n", "the file looks ;-separated. Pass --sep ';'."),
    "header": ("1,2,3\n4,5,6\n", "Add a header, which the training file has."),
    "renamed": ("id,u,vv\ns,1,2\n", "Should 'vv' be called 'v'?"),
    "no id": ("name,u,v\ns,1,2\n", "pass --id NAME if it is called otherwise, --id '' if there is"),
    "large": (HEADER + "s,1,1e300,\n", "is not finite in float32. Scale the column."),
    "role": (HEADER + "s,1,2,\n", "column 'u' is both the time and an input. Pass another --time."),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREADABLE)
def test_predict_advises_nothing_that_it_has_no_flag_for(tmp_path, coadjoint, name):
    content, words = UNREADABLE[name]
    (tmp_path / "new.csv").write_text(content)
    flags = ["--time", "u"] if name == "role" else []
    code, _, err = coadjoint("predict", str(FOLDERS / "data"), str(tmp_path / "new.csv"), *flags)
    assert code == 3
    assert words in err
    parameters = typer.main.get_command(app).commands["predict"].params
    known = {option for parameter in parameters for option in parameter.opts}
    assert set(re.findall("--[a-z-]+", err)) <= known
