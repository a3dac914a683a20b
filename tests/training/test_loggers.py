"""Loggers: what TensorBoard, MLflow and wandb are told of a run, without any network."""

import contextlib
import json
import math
import sys
import types

import pytest

from coadjoint.errors import ConfigError, MissingError, NumericalError, StorageError
from coadjoint.training import loggers
from coadjoint.training.signals import Interrupted

SMALL = "addition --length 10 --hidden 3 --batch 4 --every 2 --tests 4 --probes 2 --quiet"
ROWS = [
    {"kind": "train", "step": 1, "loss": 0.5, "note": "text", "count": 3},
    {"kind": "held-out", "split": "valid", "step": 2, "loss": 0.25, "f1": math.nan},
    {"kind": "probe", "step": 2, "decay": None, "gradients": {"W": 1.5}},
]


def test_numbers_of_rows():
    assert list(loggers.scalars(ROWS[0])) == [("train/loss", 0.5)]
    assert [name for name, _ in loggers.scalars(ROWS[1])] == ["valid/loss", "valid/f1"]
    assert list(loggers.scalars(ROWS[2])) == [("gradient/W", 1.5)]


def test_names():
    assert loggers.logger_names(None) == []
    assert loggers.logger_names("mlflow") == ["mlflow"]
    assert loggers.logger_names(["wandb", "mlflow", "wandb"], True) == [
        "tensorboard",
        "wandb",
        "mlflow",
    ]
    with pytest.raises(ConfigError, match=r"some of tensorboard, mlflow, wandb\. Did you"):
        loggers.logger_names("mlfow")


def test_settings_by_dotted_names():
    settings = {"training": {"steps": 3, "seconds": None}, "network": {"deep": [1, 2]}}
    assert dict(loggers.flat_settings(settings)) == {
        "training.steps": "3",
        "network.deep": "[1, 2]",
    }


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_packages_that_are_missing(monkeypatch, tmp_path, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingError, match=rf"--logger {name} needs .* 'coadjoint\[{name}\]'"):
        loggers.make_loggers([name], tmp_path)


def test_tensorboard_that_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingError, match="--tensorboard needs"):
        loggers.make_loggers(["tensorboard"], tmp_path)


def test_ids_are_kept(tmp_path):
    assert loggers.read_id(tmp_path, "mlflow") is None
    loggers.write_id(tmp_path, "mlflow", "a1")
    loggers.write_id(tmp_path, "wandb", "b2")
    assert json.loads((tmp_path / "loggers.json").read_text()) == {"mlflow": "a1", "wandb": "b2"}
    assert loggers.read_id(tmp_path, "mlflow") == "a1"
    (tmp_path / "loggers.json").write_text('{"mlflow": "../x y", "wandb": 3}')
    assert loggers.read_id(tmp_path, "mlflow") is None
    assert loggers.read_id(tmp_path, "wandb") is None
    (tmp_path / "loggers.json").write_text("{")
    with pytest.raises(StorageError, match="it holds no JSON"):
        loggers.read_id(tmp_path, "mlflow")


class Closed:
    def __call__(self, row):
        pass

    def close(self, ending="finished"):
        self.ending = ending


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (None, "finished"),
        (NumericalError("x"), "failed"),
        (Interrupted("x"), "interrupted"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_endings(error, ending):
    logger = Closed()

    expected = contextlib.nullcontext() if error is None else pytest.raises(type(error))
    with expected, loggers.closed_at_the_end([logger]):
        if error is not None:
            raise error
    assert logger.ending == ending


def test_a_failure_is_reported_once():
    said = []
    calls = []

    class Failing(Closed):
        def __call__(self, row):
            calls.append(row)
            raise RuntimeError("the server is away.")

    logger = loggers.SteadyLogger("mlflow", Failing(), said.append)
    logger(ROWS[0])
    logger(ROWS[1])
    logger.close()
    assert len(calls) == 1
    assert said == ["mlflow failed and is left out from here on: the server is away."]


class FakeStore:
    """As much of an MLflow store as the logger uses."""

    def __init__(self):
        self.params, self.metrics, self.artifacts, self.tags = {}, [], [], {}
        self.runs, self.status = [], ""

    def client(self, tracking_uri):
        self.uri = tracking_uri
        return self

    def get_experiment_by_name(self, name):
        self.experiment = name
        return types.SimpleNamespace(experiment_id="7") if self.runs else None

    def create_experiment(self, name, artifact_location):
        self.place = artifact_location
        return "7"

    def create_run(self, experiment, run_name, tags):
        self.runs.append(run_name)
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"run{len(self.runs)}"))

    def get_run(self, id):
        if not self.runs or id != f"run{len(self.runs)}":
            raise KeyError(id)
        return types.SimpleNamespace(data=types.SimpleNamespace(params=self.params))

    def update_run(self, id, status):
        self.status = status

    def log_batch(self, id, metrics=(), params=()):
        self.metrics += metrics
        self.params |= dict(params)

    def set_tag(self, id, name, value):
        self.tags[name] = value

    def log_artifact(self, id, path):
        self.artifacts.append(path)

    def set_terminated(self, id, status):
        self.status = status


@pytest.fixture
def store(monkeypatch):
    found = FakeStore()
    entities = types.SimpleNamespace(Metric=lambda *x: x, Param=lambda *x: x)
    module = types.SimpleNamespace(MlflowClient=found.client, entities=entities)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_mlflow(store, tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    (run / "report.html").write_text("page")
    (logger,) = loggers.make_loggers(["mlflow"], run, {"training": {"steps": 3}})
    for row in ROWS:
        logger(row)
    logger.close("interrupted")
    assert store.uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert store.place == (tmp_path / "mlartifacts").as_uri()
    assert store.experiment == "coadjoint"
    assert store.params == {"training.steps": "3"}
    assert [(name, step) for name, _, _, step in store.metrics] == [
        ("train/loss", 1),
        ("valid/loss", 2),
        ("valid/f1", 2),
        ("gradient/W", 2),
    ]
    assert store.artifacts == [str(run / "report.html")]
    assert store.status == "KILLED"
    # a resumed run
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5000")
    (logger,) = loggers.make_loggers(["mlflow"], run, {"training": {"steps": 5}})
    logger(ROWS[0])
    assert store.status == "RUNNING"
    logger.close()
    assert store.runs == ["run"]
    assert (store.uri, store.experiment) == ("http://localhost:5000", "mine")
    assert store.params == {"training.steps": "3"}
    assert store.tags == {"resumed.training.steps": "5"}
    assert store.status == "FINISHED"
    # a store that does not know the run
    (run / "loggers.json").write_text('{"mlflow": "other"}')
    (logger,) = loggers.make_loggers(["mlflow"], run)
    logger(ROWS[0])
    assert store.runs == ["run", "run"]
    assert loggers.read_id(run, "mlflow") == "run2"


def test_a_store_of_mlflow_that_does_not_work(store, tmp_path, monkeypatch):
    def refuse(name):
        raise RuntimeError("no such host")

    monkeypatch.setattr(store, "get_experiment_by_name", refuse)
    (logger,) = loggers.make_loggers(["mlflow"], tmp_path)
    with pytest.raises(ConfigError, match=r"does not work: no such host\. Set MLFLOW"):
        logger(ROWS[0])
    logger.close()


class FakeWandb:
    """As much of wandb as the logger uses."""

    Settings = staticmethod(lambda **options: options)

    def __init__(self, place):
        self.begun, self.rows, self.defined, self.dir = [], [], [], str(place)

    def init(self, **options):
        self.begun.append(options)
        return self

    def define_metric(self, name, **options):
        self.defined.append(name)

    def log(self, row):
        self.rows.append(row)

    def finish(self, exit_code):
        self.exit_code = exit_code


def test_wandb(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("x: 1\n")
    (tmp_path / "kept").mkdir()
    fake = FakeWandb(tmp_path / "kept")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("WANDB_RUN_ID", "WANDB_DIR", "WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    (logger,) = loggers.make_loggers(["wandb"], run, {"training": {"steps": 3}})
    for row in ROWS:
        logger(row)
    logger.close("failed")
    assert fake.rows[0] == {"step": 1, "train/loss": 0.5}
    assert fake.rows[2] == {"step": 2, "gradient/W": 1.5}
    assert fake.exit_code == 1
    assert (tmp_path / "kept" / "config.yaml").read_text() == "x: 1\n"
    first = fake.begun[0]
    assert (first["project"], first["name"], first["dir"]) == ("coadjoint", "run", str(run))
    assert first["config"] == {"training": {"steps": 3}}
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    (logger,) = loggers.make_loggers(["wandb"], run)
    logger(ROWS[0])
    logger.close()
    assert fake.begun[1]["id"] == first["id"]
    assert fake.begun[1]["project"] == "mine"
    assert fake.exit_code == 0


def test_wandb_without_a_login(tmp_path, monkeypatch):
    fake = FakeWandb(tmp_path)

    def refuse(**options):
        raise RuntimeError("api_key not configured")

    fake.init = refuse
    monkeypatch.setitem(sys.modules, "wandb", fake)
    (logger,) = loggers.make_loggers(["wandb"], tmp_path)
    with pytest.raises(ConfigError, match=r"api_key not configured\. Log in with"):
        logger(ROWS[0])


@pytest.mark.slow
def test_the_flag(coadjoint, store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*SMALL.split(), "--steps", "4", "--out", "runs/a", "--logger", "mlflow"]
    assert coadjoint("train", *words) == (0, "", "")
    assert store.uri == f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert store.params["training.steps"] == "4"
    assert store.params["task.name"] == "addition"
    names = [path.rpartition("/")[2] for path in store.artifacts]
    assert names == ["config.yaml", "report.html", "result.json", "model.safetensors"]
    assert coadjoint("resume", "runs/a", "--steps", "6", "--quiet") == (0, "", "")
    assert store.runs == ["a"]
    steps = [step for name, _, _, step in store.metrics if name == "test/loss"]
    assert steps == [0, 2, 4, 6]
    code, _, err = coadjoint("train", *SMALL.split(), "--logger", "mlfow", "--out", "runs/b")
    assert code == 2
    assert "Did you mean mlflow?" in err


@pytest.mark.slow
def test_mlflow_itself(coadjoint, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    words = [*SMALL.split(), "--steps", "4", "--out", "runs/a", "--logger", "mlflow"]
    assert coadjoint("train", *words)[0] == 0
    assert coadjoint("resume", "runs/a", "--steps", "6", "--quiet")[0] == 0
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/runs/mlflow.db")
    experiment = client.get_experiment_by_name("coadjoint")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["training.steps"] == "4"
    assert run.data.tags["resumed.training.steps"] == "6"
    history = client.get_metric_history(run.info.run_id, "test/loss")
    assert [metric.step for metric in history] == [0, 2, 4, 6]
    rows = [json.loads(line) for line in (tmp_path / "runs/a/metrics.jsonl").open()]
    losses = [row["loss"] for row in rows if row["kind"] == "held-out"]
    assert [metric.value for metric in history] == losses
    kept = {each.path for each in client.list_artifacts(run.info.run_id)}
    assert kept == set(loggers.ARTIFACTS)


@pytest.mark.slow
def test_wandb_itself_offline(coadjoint, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = [*SMALL.split(), "--steps", "4", "--out", "a", "--logger", "wandb"]
    assert coadjoint("train", *words)[0] == 0
    assert coadjoint("resume", "a", "--steps", "6", "--quiet")[0] == 0
    wandb.teardown()  # as at the end of a program: its service may write until then
    id = loggers.read_id(tmp_path / "a", "wandb")
    folders = sorted((tmp_path / "a" / "wandb").glob("offline-run-*"))
    assert [folder.name.endswith(f"-{id}") for folder in folders] == [True, True]
    for folder in folders:
        assert (folder / f"run-{id}.wandb").stat().st_size > 1000
        assert (folder / "files" / "report.html").is_file()
