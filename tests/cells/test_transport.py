"""What users send to another process arrives bit for bit.

By pickle, deepcopy, torch.save, spawned processes and joblib.
"""

from __future__ import annotations

import copy
import io
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

import coadjoint as co
from coadjoint.cells import library, steps
from coadjoint.errors import InputError, Unsupported
from coadjoint.objectives import losses
from coadjoint.objectives.penalties import PENALTIES
from coadjoint.optimisers import recipes, schedules
from compare import same_bits

F64 = torch.float64
SIZES = {"inputs": 3, "hidden": 4, "outputs": 2, "dtype": F64}


@co.cell(slots="h", gates="f h", parameters={"k": 0.5})
def gated(z, v, x, p):
    """h' = f h + (1 - f) tanh(k (z + v))"""
    f = co.sigmoid(z.f + v.f)
    return f * x.h + (1 - f) * co.tanh(p.k * (z.h + v.h))


def plain_formula(z, v, x, p):
    return co.tanh(z + v) / 2


renamed = co.cell("h")(
    plain_formula
)  # found by the name it has in the module, which is not that of its function


class Cells:
    @staticmethod
    @co.cell("h")
    def nested(z, v, x, p):
        return co.tanh(z + v) / 3


def own_step(u, x):
    return torch.tanh(u @ torch.ones(3, 4, dtype=u.dtype) + x)


def own_output(a):
    return torch.tanh(a) * 2


def own_penalty(lam):
    return lam.norms()[1]


def own_weight(step):
    return 1 / (step + 2)


def network(cell="elman", **options):
    return lambda: co.Network(cell, **SIZES, **options)


MAKE = {
    **{name: network(name) for name in (*library.CELLS, *steps.STEPS)},
    **{
        f"structure {s}": network(structure=s)
        for s in ("antisymmetric", "orthogonal", "cayley", "diagonal", "low-rank")
    },
    **{f"readout {r}": network(readout=r) for r in ("every", "tilted", "tilted-tanh", "attention")},
    "dale": network("rate", structure="dale", noise=0.1),
    "options": network("antisymmetric", eps=0.05, activation="sigmoid"),
    "activation": network("elman", activation=co.atan),
    "learned": network(x0="learned", deep=[3], skip=True, dropout=0.2, output=own_output),
    "own cell": network(gated),
    "own cell, renamed": network(renamed),
    "own cell, nested": network(Cells.nested),
    "own step": network(own_step),
    "torch cell": lambda: co.Network(torch.nn.GRUCell(3, 4, dtype=F64), **SIZES),
    "stack": lambda: co.Stack(["gru", "antisymmetric", gated], bidirectional=True, **SIZES),
    "encoder-decoder": lambda: co.EncoderDecoder("gru", inputs=3, hidden=4, outputs=3, dtype=F64),
    "reservoir": lambda: co.Reservoir(inputs=3, hidden=8, outputs=2, seed=0),
    "noisy": lambda: co.nn.LSTM(3, 4, recurrent_dropout=0.2, zoneout=0.1, peephole=True, dtype=F64),
    **{
        kind: (lambda kind=kind: getattr(co.nn, kind)(3, 4, dtype=F64))
        for kind in ("RNN", "LSTM", "GRU", "GRUCell")
    },
}


def saved(thing):
    """By torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(thing):
    return pickle.loads(pickle.dumps(thing))


WAYS = {"pickle": pickled, "deepcopy": copy.deepcopy, "torch.save": saved}


def answers(model):
    """Outputs and gradients of a model for fixed inputs."""
    torch.manual_seed(3)
    dtype = next(model.parameters(), torch.zeros(0, dtype=torch.float32)).dtype
    u = torch.randn(5, 2, 3, dtype=dtype)
    if isinstance(model, co.Reservoir):
        return [model(u).x]
    if isinstance(model, torch.nn.RNNCellBase):
        u = u[0]
    found = model(u)
    if isinstance(model, co.EncoderDecoder):
        y = torch.tensor([[0, 1], [1, 0], [2, 2]])
        value = found.loss("cross-entropy", y).sum()
        outputs = [value]
    elif hasattr(found, "y_hat"):
        outputs = [found.y_hat, found.costates("squared", torch.ones_like(found.y_hat)).loss]
        value = outputs[1].sum() + outputs[0].sum()
    else:
        outputs = [found[0] if isinstance(found, tuple) else found]
        value = outputs[0].square().sum()
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(value, trained, allow_unused=True)
    return [
        *(y.detach() for y in outputs),
        *(torch.zeros(0) if g is None else g for g in gradients),
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.sampled(3)
def test_a_network_comes_back_bit_for_bit(name, way):
    torch.manual_seed(0)
    model = MAKE[name]()
    twin = WAYS[way](model)
    assert repr(twin) == repr(model)
    assert [n for n, _ in twin.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [n for n, _ in twin.named_buffers()] == [n for n, _ in model.named_buffers()]
    same_bits(answers(twin), answers(model))
    for parameter in model.parameters():  # the twin has weights of its own
        parameter.data.add_(1)
    if list(model.parameters()):
        assert not all(
            torch.equal(a, b) for a, b in zip(answers(twin), answers(model), strict=True)
        )


def test_a_structure_is_still_one_after_the_journey():
    """A pickled structure trains, takes a state_dict, and can be pickled again."""
    torch.manual_seed(0)
    net = pickled(pickled(co.Network("elman", structure="orthogonal", **SIZES)))
    with torch.no_grad():
        net.parametrizations["W"].original.add_(torch.randn(4, 4, dtype=F64))
    assert torch.allclose(net.W @ net.W.T, torch.eye(4, dtype=F64))
    other = co.Network("elman", structure="orthogonal", **SIZES)
    other.load_state_dict(net.state_dict())
    assert torch.equal(other.W, net.W)
    assert type(net) is not co.Network
    assert isinstance(pickled(net), co.Network)


@pytest.mark.parametrize("name", library.CELLS)
def test_a_cell_of_the_table_is_pickled_by_name(name):
    cell = library.named(name)
    assert pickled(cell) is cell
    assert copy.copy(cell) is copy.deepcopy(cell) is cell
    assert len(pickle.dumps(cell)) < 200  # a name and options, no formula


def test_cells_with_options_arrive():
    for cell in (
        library.named("rate", "relu", noise=0.3),
        library.named("antisymmetric-gated", eps=0.02),
        co.cells.noisy(co.cells.lstm, True, True),
        co.cells.elman(co.atan),
    ):
        assert pickled(cell) is cell


def test_a_cell_of_the_user_is_pickled_by_its_path():
    for cell in (gated, renamed, Cells.nested):
        assert pickled(cell) is cell


def test_a_cell_inside_a_function_says_what_to_do():
    @co.cell("h")
    def local(z, v, x, p):
        return co.tanh(z + v)

    net = co.Network(local, **SIZES)
    copy.deepcopy(net)
    for send in (pickle.dumps, saved):
        with pytest.raises(
            InputError, match=r"cell 'local' cannot be pickled: .* not at the top level of module"
        ):
            send(net)


def test_a_cell_that_is_not_there_says_what_to_do(tmp_path, monkeypatch):
    text = (
        "import coadjoint as co\n@co.cell('h')\ndef mine(z, v, x, p):\n    return co.tanh(z + v)\n"
    )
    (tmp_path / "cells_of_mine.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    import cells_of_mine

    sent = pickle.dumps(cells_of_mine.mine)
    assert pickle.loads(sent) is cells_of_mine.mine
    del cells_of_mine.mine
    with pytest.raises(
        InputError,
        match=r"^cells_of_mine\.mine cannot be found in this process: cells_of_mine has no",
    ):
        pickle.loads(sent)
    monkeypatch.delitem(sys.modules, "cells_of_mine")
    (tmp_path / "cells_of_mine.py").unlink()
    with pytest.raises(
        InputError, match=r"^cells_of_mine\.mine cannot be found in this process: No module named"
    ):
        pickle.loads(sent)


def objectives(method, net):
    batch = co.Batch(torch.linspace(-1, 1, 30, dtype=F64).reshape(5, 2, 3), torch.tensor([0, 1]))
    found = method(net, batch, "cross-entropy")
    return [found.losses, found.penalties, *found.gradient.values()]


WEIGHTS = {
    "steered": co.penalties.Steered(1.0, 0.1),
    "inverse": co.penalties.inverse_time(2.0, 0.3),
    "exponential": co.penalties.exponential(2.0, 0.9),
    "linear": co.penalties.linear(2.0, 1.0, 10),
    "own": own_weight,
}
PENALISED = {
    **{name: G for name, G in PENALTIES.items() if name != "output-variance"},
    "barrier of its own": co.penalties.barrier(1e-2),
    "sum": 0.1 * co.penalties.log_ratio + co.penalties.variance * 2,
    "part": co.penalties.log_ratio.on("whole") + co.penalties.barrier(0.5).on(layer=0),
    "output": co.penalties.of_output("log-ratio"),
    "tangent along v": co.penalties.tangent(torch.ones(5, 2, 3, dtype=F64), 0.1),
    "own": own_penalty,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "method",
    [
        *(pytest.param(co.Penalised(G, 0.3), id=name) for name, G in PENALISED.items()),
        *(
            pytest.param(co.Penalised("log-ratio", rho), id=f"weight {name}")
            for name, rho in WEIGHTS.items()
        ),
        pytest.param(co.BPTT(), id="BPTT"),
        pytest.param(co.RTRL(), id="RTRL"),
        pytest.param(co.Truncated(2, 2), id="Truncated"),
    ],
)
@pytest.mark.sampled(3)
def test_a_method_finds_the_same_gradient_after_the_journey(method, way):
    torch.manual_seed(0)
    net = co.Network("gru", output="softmax", **SIZES)
    method = copy.deepcopy(method)  # a steered weight moves
    twin = WAYS[way](method)
    same_bits(objectives(twin, net), objectives(method, net))
    again = WAYS[way](method)  # after use, with what it has kept
    same_bits(objectives(again, net), objectives(method, net))


@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_of_the_table_is_pickled_by_name(name):
    assert pickled(PENALTIES[name]).name == PENALTIES[name].name
    assert len(pickle.dumps(PENALTIES[name])) < 200


@pytest.mark.parametrize(
    "loss", [*losses.LOSSES.values(), losses.huber(0.3)], ids=lambda loss: loss.name
)
def test_losses_arrive(loss):
    a = torch.linspace(-2, 2, 8, dtype=F64).reshape(4, 2)
    y = torch.tensor([0, 1, 1, 0]) if loss.name == "cross-entropy" else torch.rand(4, 2, dtype=F64)
    for way in WAYS.values():
        assert torch.equal(way(loss)(a, y, "identity"), loss(a, y, "identity"))


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_optimisers_and_schedules_arrive(name):
    schedule = schedules.SCHEDULES[name](warmup=3)
    recipe = recipes.Optimiser("adam", 0.1, {"amsgrad": True}, schedule)
    for way in WAYS.values():
        twin = way(recipe)
        assert (twin.name, twin.lr, twin.options) == (recipe.name, recipe.lr, recipe.options)
        assert [twin.schedule(k, 20) for k in range(25)] == [schedule(k, 20) for k in range(25)]
        assert (twin.schedule.decay, twin.schedule.patience) == (schedule.decay, schedule.patience)


@pytest.mark.parametrize(
    "name", [name for name in co.tasks.TASKS if "length" in co.tasks.options(name)]
)
def test_tasks_arrive_and_draw_the_same_batches(name):
    needed = {option: 12 for option, default in co.tasks.options(name).items() if default is ...}
    task = co.tasks.make(name, **needed)
    same_batches(task)


def test_a_task_of_sequences_arrives():
    torch.manual_seed(0)
    u = [torch.randn(4, 3).numpy() for _ in range(7)]
    same_batches(Own({"train": co.tasks.Sequences(u, list(range(7)))}))


class Own(co.tasks.Collection):
    name, readout, reduce = "own", "last", "sum"


def same_batches(task):
    before = task.batch(3, 4, seed=5)
    for way in WAYS.values():
        for batch in (way(task).batch(3, 4, seed=5), way(before)):
            assert torch.equal(batch.u, before.u)
            assert batch.y is before.y is None or torch.equal(
                torch.as_tensor(batch.y), torch.as_tensor(before.y)
            )


def test_an_evaluation_arrives_without_its_run():
    net = co.Network("elman", **SIZES)
    batch = co.Batch(torch.randn(5, 2, 3, dtype=F64), torch.randn(2, 2, dtype=F64))
    found = co.Penalised("log-ratio", 0.1)(net, batch, "squared")
    for send in (pickled, saved):
        twin = send(found)
        same_bits([twin.losses, *twin.gradient.values()], [found.losses, *found.gradient.values()])
        assert torch.equal(twin.objective, found.objective)
        with pytest.raises(Unsupported, match=r"made in another process, and its run stayed there"):
            _ = twin.costates
    assert torch.equal(copy.deepcopy(found).costates.lam, found.costates.lam)


def test_a_run_says_that_it_stays():
    net = co.Network("elman", **SIZES)
    run = net(torch.randn(5, 2, 3, dtype=F64))
    for thing in (run, run.costates("squared", torch.randn(2, 2, dtype=F64))):
        for send in (pickle.dumps, copy.deepcopy):
            with pytest.raises(Unsupported, match=r"copy their tensors, trajectory\.x\.detach\(\)"):
                send(thing)


TRAVELLERS = ("lstm", "rate", "lipschitz", "options", "own cell", "stack", "encoder-decoder", "GRU")


def sent():
    torch.manual_seed(0)
    return [MAKE[name]() for name in TRAVELLERS]


def all_answers(models):
    torch.set_num_threads(1)
    return [answers(model) for model in models]


@pytest.mark.slow
def test_models_arrive_in_a_spawned_process():
    models = sent()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(all_answers, models).result(timeout=300)
    for there, model in zip(found, models, strict=True):
        same_bits(there, answers(model))


@pytest.mark.slow
@pytest.mark.thorough
def test_models_arrive_in_a_process_of_joblib():
    joblib = pytest.importorskip("joblib")
    models = sent()
    [found] = joblib.Parallel(n_jobs=2, backend="loky", timeout=300)(
        [joblib.delayed(all_answers)(models)]
    )
    for there, model in zip(found, models, strict=True):
        same_bits(there, answers(model))


SCRIPT = """
import multiprocessing
import torch
import coadjoint as co

@co.cell("h")
def everywhere(z, v, x, p):
    return co.tanh(z + v)

def work(net):
    print(net.name, net(torch.ones(2, 1, 3)).y_hat.shape[1], flush=True)

if __name__ == "__main__":
    @co.cell("h")
    def only_here(z, v, x, p):
        return co.tanh(z + v)

    for cell in (everywhere, only_here):
        net = co.Network(cell, inputs=3, hidden=4, outputs=2)
        process = multiprocessing.get_context("spawn").Process(target=work, args=(net,))
        process.start()
        process.join(300)
        print("exit code", process.exitcode, flush=True)
"""


@pytest.mark.slow
def test_cells_of_a_script_arrive_or_say_what_to_do(tmp_path):
    """Under spawn a script is imported again: what stands in its main block is not there."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["everywhere 2", "exit code 0", "exit code 1"]
    assert "__main__.only_here cannot be found in this process" in done.stderr
