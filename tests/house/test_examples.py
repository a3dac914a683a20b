"""Each example of co.nn runs by itself, and prints and demonstrates what it says."""

import importlib
import os
import re
import runpy
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy

import warm
from paths import EXAMPLES

pytestmark = pytest.mark.slow

REFUSAL = "Double backwards is not supported for CuDNN RNNs due to limitations in the CuDNN API"
NUMBER = r"(-?\d+\.?\d*)"


def printed(name, *arguments, folder):
    """What an example prints, in a process and an empty folder of its own, which it
    leaves empty.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = warm.run(EXAMPLES / f"{name}.py", *arguments, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not list(folder.iterdir())
    return done.stdout


def figures(words, text):
    """The numbers that follow the words, one for each line that has them."""
    return [float(x) for x in re.findall(re.escape(words) + r"[ ^]*(?:10\^)?" + NUMBER, text)]


def wgan_gp(text):
    distances, norms = figures("distance", text), figures("gradient norm", text)
    assert norms[0] < 0.95
    assert norms[-1] == pytest.approx(1, abs=0.07)
    assert 0 < distances[-1] < 0.7 * max(distances)


def natural_gradient(text):
    returns, steps = figures("return", text), figures("KL of the step", text)
    assert returns[0] < 0.35  # one of four
    assert returns[-1] > 0.75
    assert all(0.01 < kl <= 0.05 for kl in steps)


def maml(text):
    nothing, first_order, second_order = figures("after one step", text)
    assert second_order < 0.45 * nothing
    assert second_order < 0.9 * first_order


def sobolev(text):
    values, slopes = figures("of values", text), figures("of derivatives", text)
    assert values[1] < 0.3 * values[0]
    assert slopes[1] < 0.3 * slopes[0]


USES = (wgan_gp, natural_gradient, maml, sobolev)
LONG = (wgan_gp, maml)  # `make test` runs them for a few steps alone


def sampled(names, left):
    """Cases of a table; those that are `left` to a thorough run are marked."""
    return [pytest.param(n, marks=[pytest.mark.thorough] * (n in left)) for n in names]


@pytest.mark.parametrize("check", sampled(USES, LONG), ids=lambda f: f.__name__)
def test_a_use_shows_what_it_says(check, tmp_path):
    check(printed(check.__name__, "cpu", folder=tmp_path))


@pytest.mark.parametrize("check", USES, ids=lambda f: f.__name__)
def test_writing_co_nn_for_torch_nn_is_the_whole_change(check, tmp_path, monkeypatch, capsys):
    """On a CPU torch.nn differentiates twice, too: the same source with its modules prints the
    same, after a few steps.
    """
    source = (EXAMPLES / f"{check.__name__}.py").read_text()
    code = source.split('"""', 2)[2]  # after the docstring
    assert len([line for line in code.splitlines() if line.strip()]) < 60
    assert REFUSAL in " ".join(source.split())
    short = re.sub(
        r"range\(\d{2,}\)|, 250\)", lambda m: "range(3)" if "range" in m[0] else ", 3)", source
    )
    ours, theirs = short, re.sub(r"co\.nn\.(?=[A-Z])", "torch.nn.", short)
    assert source != ours != theirs
    found = []
    monkeypatch.setattr(sys, "argv", ["example", "cpu"])
    for name, text in (("ours", ours), ("theirs", theirs)):
        (tmp_path / f"{name}.py").write_text(text)
        runpy.run_path(str(tmp_path / f"{name}.py"))
        found.append([float(x) for x in re.findall(NUMBER, capsys.readouterr().out)])
    assert found[0]
    assert found[0] == pytest.approx(found[1], rel=1e-3, abs=0.0011)


def test_costates_of_a_transformer_are_kept_alive(tmp_path):
    """They vanish in plain training, and the penalty keeps them."""
    text = printed("record_transformer", folder=tmp_path)
    assert len(figures("log-norm", text)) == 24  # eight blocks, three times
    before, plain, penalised = figures("from the last block to the first:", text)
    assert plain < before - 4
    assert penalised > before - 1


LOOPS = {"loop_plain": "torch", "loop_lightning": "lightning", "loop_accelerate": "accelerate"}


# what the other loops do is known from one step: test_every_loop_takes_the_same_gradient
@pytest.mark.parametrize("name", sampled(LOOPS, ("loop_lightning", "loop_accelerate")))
def test_a_loop_shows_what_it_says(name, tmp_path):
    """Gradients reach the first step, where they do not in plain training."""
    pytest.importorskip(LOOPS[name])
    lines = printed(name, "150", folder=tmp_path).splitlines()
    reach = {line.split(":")[0]: figures("at the first step", line)[0] for line in lines}
    assert abs(reach["penalised"]) < 2
    assert reach.get("plain", -20) < -8


@pytest.mark.parametrize("name", [n for n in LOOPS if n != "loop_plain"])
def test_a_loop_without_its_package_is_refused_in_one_line(name, tmp_path):
    missing = (
        f"import runpy, sys; sys.modules[{LOOPS[name]!r}] = None; sys.path.insert(0, "
        f"{str(EXAMPLES)!r}); "
    )
    missing += f"runpy.run_path({str(EXAMPLES / name)!r} + '.py', run_name='__main__')"
    done = warm.run("-c", missing, cwd=tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert f"not installed: pip install {LOOPS[name]}" in done.stderr


@pytest.mark.parametrize("name", [*LOOPS, "loop_ddp", "loop_fsdp"])
def test_the_two_lines_are_the_same_in_every_loop(name):
    source = (EXAMPLES / f"{name}.py").read_text().replace("self.", "")
    one, two = (
        "with co.record(model) as tape:  # one line",
        '* tape.penalty("log-ratio", loss)  # and another',
    )
    assert [source.count(line) for line in (one, two)] == [1, 1]


def penalised_gradient(model, u, y, weight):
    """By torch alone: a loop over steps, its states' gradients, and the gradient of what is made of
    them.
    """
    rnn, h, states = model.rnn, u.new_zeros(u.shape[1], model.rnn.hidden_size), []
    for x in u:
        h = torch.tanh(
            x @ rnn.weight_ih_l0.T + rnn.bias_ih_l0 + h @ rnn.weight_hh_l0.T + rnn.bias_hh_l0
        )
        states.append(h)
    loss = cross_entropy(model.out(h), y, reduction="none")
    lam = torch.stack(torch.autograd.grad(loss.sum(), states, create_graph=True))
    G = lam.square().sum(-1).log().div(2).diff(dim=0).square().mean(0)
    gradient = torch.autograd.grad((loss + weight * G).mean(), list(model.parameters()))
    size = torch.cat([g.flatten() for g in gradient]).norm()
    return [g / max(size + 1e-6, 1) for g in gradient]  # as clip_grad_norm_ has it


@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_takes_the_same_gradient(name, tmp_path, monkeypatch):
    pytest.importorskip(LOOPS[name])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    plain, loop = (importlib.import_module(n) for n in ("loop_plain", name))
    u, y = plain.batch(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        monkeypatch.setattr(loop, "batch", lambda step: (u.double(), y))
        torch.manual_seed(0)
        start = plain.Reader()
        expected = penalised_gradient(start, u.double(), y, 2.0)
        model = loop.train(1, 2.0)
    finally:
        torch.set_default_dtype(before)
    for (key, parameter), g, w in zip(
        model.named_parameters(), expected, start.parameters(), strict=True
    ):
        assert (parameter.grad - g).norm() < 1e-11 * g.norm(), key
        assert (parameter - w).abs().max() > 1e-4, key  # and goes a step
