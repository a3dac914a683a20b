"""A program becomes the weights of a ReLU network, which runs it (Hyotyniemi 1996).

    python examples/classics/programs.py [--out demo]

Galvan (2016), section 1.7: recurrent networks can do what Turing machines can. A program works
on variables that hold whole numbers from 0 up, with five instructions:

    inc v            v + 1
    dec v            v - 1, but 0 stays 0
    ifzero v label   go on at the label if v is 0, otherwise with the next line
    goto label
    stop

The network x_t = relu(W x_{t-1}) has one unit for each variable, one for each instruction, and a
second one for each ifzero. Variables keep their values, and the unit of the instruction that runs
is 1. An instruction takes one step, an ifzero whose variable is 0 takes two: its first unit starts
the next line at once; its second one, relu(first - v), is 1 a step later if v was 0. It then takes
back whatever the next line has begun, by weights opposite to those of that line's unit, and starts
the label.
"""

import torch
from drawing import BLUE, RED, folder_from, panels, save

import coadjoint as co

PROGRAMS = {
    "addition": """
        loop: ifzero b done
              dec b
              inc a
              goto loop
        done: stop
    """,
    "multiplication": """
        times: ifzero a done
               dec a
        add:   ifzero b again
               dec b
               inc c
               inc kept
               goto add
        again: ifzero kept times
               dec kept
               inc b
               goto again
        done:  stop
    """,
    "parity": """
        loop: ifzero n done
              dec n
              ifzero n odd
              dec n
              goto loop
        odd:  inc p
        done: stop
    """,
}


def parse(text):
    """[(operation, variable or None, line to go on at or None)] and the names of the variables."""
    labels, lines = {}, []
    for line in text.strip().splitlines():
        label, colon, rest = line.rpartition(":")
        if colon:
            labels[label.strip()] = len(lines)
        lines.append(rest.split())
    if lines[-1][0] not in ("stop", "goto"):
        raise ValueError(f"the last line must be stop or goto; got {' '.join(lines[-1])}")
    instructions, variables = [], []
    for number, (operation, *words) in enumerate(lines):
        variable = None
        if operation in ("inc", "dec", "ifzero"):
            variable = words.pop(0)
        if variable is not None and variable not in variables:
            variables.append(variable)
        target = {"goto": None, "ifzero": None, "stop": number}.get(operation, number + 1)
        instructions.append((operation, variable, labels[words[0]] if words else target))
    return instructions, variables


class Machine:
    """A program as a network.

    variables  the names of the first units
    units      the names of all units: variables, lines, and "line, zero" for each ifzero
    network    a co.Network with relu units, whose outputs are the variables
    """

    def __init__(self, text):
        self.instructions, self.variables = parse(text)
        tests = self.places("ifzero")
        lines = [f"{i} {' '.join(filter(None, op[:2]))}" for i, op in enumerate(self.instructions)]
        self.units = [*self.variables, *lines, *(f"{lines[i]}, zero" for i in tests)]
        n, d = len(self.units), len(self.variables)
        W = torch.zeros(n, n, dtype=torch.float64)
        W[range(d), range(d)] = 1  # variables keep their values
        for i, (operation, variable, target) in enumerate(self.instructions):
            W[d + (i + 1 if operation == "ifzero" else target), d + i] += 1
            if operation in ("inc", "dec"):
                W[self.variables.index(variable), d + i] = 1 if operation == "inc" else -1
        second = {i: d + len(lines) + k for k, i in enumerate(tests)}
        for i in tests:
            W[second[i], d + i] = 1
            W[second[i], self.variables.index(self.instructions[i][1])] = -1
        for i in tests:
            W[:, second[i]] = -W[:, d + i + 1]  # what the next line has begun is taken back
            W[d + self.instructions[i][2], second[i]] += 1
        sizes = {"inputs": 1, "hidden": n, "outputs": d, "dtype": torch.float64}
        self.network = co.Network("elman", activation="relu", readout="every", bias=False, **sizes)
        with torch.no_grad():
            self.network.W.copy_(W)
            self.network.R.zero_()
            self.network.V.copy_(torch.eye(d, n))

    def places(self, operation):
        """The numbers of the lines with this operation."""
        return [i for i, (own, _, _) in enumerate(self.instructions) if own == operation]

    def run(self, steps, **values):
        """The states [steps + 1, n] of a run from these values of variables; others begin at 0."""
        x0 = torch.zeros(len(self.units), dtype=torch.float64)
        for name, value in values.items():
            x0[self.variables.index(name)] = value
        x0[len(self.variables)] = 1  # the first line
        no_input = torch.zeros(steps, 1, 1, dtype=torch.float64)
        with torch.no_grad():
            return self.network(no_input, x0=x0[None]).x[:, 0]

    def answer(self, states):
        """(the variables by name, the steps until the program stopped, or None)."""
        # A line that a test takes back was not run: the test's second unit is 1 at the same time.
        d, count = len(self.variables), len(self.instructions)
        is_void = states[:, d + count :].sum(1) > 0
        has_stopped = (states[:, [d + i for i in self.places("stop")]].sum(1) > 0) & ~is_void
        time = int(has_stopped.double().argmax()) if has_stopped.any() else None
        values = {name: int(x) for name, x in zip(self.variables, states[-1], strict=False)}
        return values, time


def main():
    folder = folder_from(__doc__)
    for name, values in (
        ("addition", {"a": 3, "b": 4}),
        ("multiplication", {"a": 6, "b": 7}),
        ("parity", {"n": 13}),
    ):
        machine = Machine(PROGRAMS[name])
        found, time = machine.answer(machine.run(600, **values))
        given = ", ".join(f"{key} = {value}" for key, value in values.items())
        then = ", ".join(f"{key} = {value}" for key, value in found.items())
        size = f"{len(machine.instructions)} lines, {len(machine.units)} units"
        print(f"{name} ({size}): {given}; after {time} steps {then}")
    machine = Machine(PROGRAMS["multiplication"])
    states = machine.run(80, a=2, b=3)
    figure, (weights, course) = panels(2, width=5.4, height=4.4)
    limit = {"cmap": "RdBu_r", "vmin": -1.5, "vmax": 1.5}
    weights.imshow(machine.network.W.detach().numpy(), **limit)
    weights.set(title="W of the multiplication", xlabel="from", ylabel="to")
    weights.set_yticks(range(len(machine.units)), machine.units, fontsize=6)
    d = len(machine.variables)
    is_on = states[:, d:].T.numpy()
    course.imshow(is_on, aspect="auto", cmap="Greys", vmin=0, vmax=1.5)
    course.set(title="2 times 3: the line that runs, and c", xlabel="step")
    course.set_yticks(range(len(is_on)), machine.units[d:], fontsize=6)
    product = course.twinx()
    product.step(range(len(states)), states[:, machine.variables.index("c")], color=RED)
    product.set_ylim(0, 12)
    product.set_yticks(range(7), [str(c) for c in range(7)], color=RED, fontsize=6)
    course.axvline(machine.answer(states)[1], color=BLUE, linewidth=0.8)
    save(figure, folder, "classics-programs")


if __name__ == "__main__":
    main()
