"""Programs compiled into ReLU weights do, step by step, what an interpreter of the program does."""

import importlib
import random

import pytest
import torch

from paths import EXAMPLES

OTHERS = {
    # the next line is itself a test, a jump to itself, a stop, or the same place as the label
    "tests in a row": """
        start: ifzero a x
               ifzero b y
               ifzero a y
               dec a
               goto start
        x:     ifzero a next
        next:  inc c
               ifzero c x
               stop
        y:     inc c
               inc c
               dec b
               dec b
    """
    + "       stop",
    "stop after a test": "ifzero a go\nstop\ngo: inc b\nstop",
    "for ever": "here: inc a\nifzero b here\nstop",
}


@pytest.fixture
def programs(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / "classics"))
    return importlib.import_module("programs")


def interpret(text, values, steps):
    """[(the variables, the active units)] at times 0..steps; units are lines, or (line, "zero")."""
    labels, lines = {}, []
    for line in text.strip().splitlines():
        if ":" in line:
            labels[line.split(":")[0].strip()] = len(lines)
        lines.append(line.split(":")[-1].split())
    memory = {words[1]: 0 for words in lines if words[0] in ("inc", "dec", "ifzero")} | values
    at, course = 0, []
    while len(course) <= steps:
        course.append((dict(memory), {at}))
        match lines[at]:
            case ["inc", name]:
                memory[name] += 1
                at += 1
            case ["dec", name]:
                memory[name] = max(0, memory[name] - 1)
                at += 1
            case ["goto", label]:
                at = labels[label]
            case ["ifzero", name, label] if memory[name] == 0:
                course.append((dict(memory), {at + 1, (at, "zero")}))  # takes the next line back
                at = labels[label]
            case ["ifzero", _, _]:
                at += 1
    return course[: steps + 1]


def states_of(machine, course):
    """The states that a network should have, [steps + 1, n]."""
    names = {name: k for k, name in enumerate(machine.variables)}
    d = len(names)
    tests = [i for i, words in enumerate(machine.instructions) if words[0] == "ifzero"]
    place = {i: d + i for i in range(len(machine.instructions))}
    place |= {(i, "zero"): d + len(machine.instructions) + k for k, i in enumerate(tests)}
    x = torch.zeros(len(course), len(machine.units), dtype=torch.float64)
    for t, (memory, active) in enumerate(course):
        for name, value in memory.items():
            x[t, names[name]] = value
        for unit in active:
            x[t, place[unit]] = 1
    return x


CASES = [
    *(("addition", {"a": a, "b": b}) for a, b in ((0, 0), (3, 4), (5, 0), (0, 2))),
    *(("multiplication", {"a": a, "b": b}) for a, b in ((0, 3), (3, 0), (1, 1), (4, 5))),
    *(("parity", {"n": n}) for n in (0, 1, 2, 7, 10)),
    *(("tests in a row", {"a": a, "b": b}) for a, b in ((0, 0), (2, 0), (2, 1), (0, 3))),
    *(("stop after a test", {"a": a}) for a in (0, 1)),
    ("for ever", {"a": 1}),
]


@pytest.mark.parametrize(("name", "values"), CASES)
def test_each_step_of_the_network_is_that_of_an_interpreter(programs, name, values):
    text = (programs.PROGRAMS | OTHERS)[name]
    machine = programs.Machine(text)
    states = machine.run(300, **values)
    assert torch.equal(states, states_of(machine, interpret(text, values, 300)))
    conditionals = sum("ifzero" in line for line in text.splitlines())
    lines = len(text.strip().splitlines())
    assert machine.network.n == len(machine.variables) + lines + conditionals


def test_programs_compute_sums_products_and_parities(programs):
    draw = random.Random(0)
    for _ in range(3):
        a, b = draw.randrange(9), draw.randrange(9)
        for name, values, result, expected in (
            ("addition", {"a": a, "b": b}, "a", a + b),
            ("multiplication", {"a": a, "b": b}, "c", a * b),
            ("parity", {"n": a + b}, "p", (a + b) % 2),
        ):
            machine = programs.Machine(programs.PROGRAMS[name])
            found, time = machine.answer(machine.run(1000, **values))
            assert found[result] == expected
            assert time is not None


def test_a_program_that_does_not_stop_has_no_time(programs):
    machine = programs.Machine(OTHERS["for ever"])
    found, time = machine.answer(machine.run(99))
    assert time is None
    assert found["a"] == 33


def test_a_program_without_an_end_is_refused(programs):
    with pytest.raises(ValueError, match="the last line must be stop or goto; got inc a"):
        programs.Machine("inc a")
