"""One thread per worker, NaN in unwritten arrays, and a count of gradient cases at the end."""

import contextlib
import gc
import os
import signal
import sys

import pytest

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's, which is read when it is imported

import torch

import poison

torch.set_num_threads(1)
poison.install()
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # no example is too slow: that would be said of the machine, and it may be busy
    settings.register_profile(
        "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("untimed")
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell starts background jobs so, and tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Tests whose names begin so share what is slow to set up: they run in one process, one after
# another.
TOGETHER = (
    "tests/cli/test_cluster.py",
    "tests/cli/test_compare.py",
    "tests/house/test_layers.py",
    "tests/house/test_lines.py",
    "tests/house/test_mutants.py",
    "tests/security/test_crafted_run_folder.py",
    "tests/training/test_many_processes.py",
    "tests/training/test_page.py",
    "tests/nn/test_own_loops.py",
    "tests/nn/test_distributed.py::test_wrapped_models_are_exact_or_refused[ddp",
    "tests/nn/test_distributed.py::test_wrapped_models_are_exact_or_refused[sharded",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """pytest-xdist hands out tests one by one, but for those in TOGETHER."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return next((begin for begin in TOGETHER if nodeid.startswith(begin)), nodeid)

        def mark_test_complete(self, node, item_index, duration=0):
            """Forget what has run: all that was given out is counted after every test."""
            scope = self._split_scope(self.registered_collections[node][item_index])
            super().mark_test_complete(node, item_index, duration)
            if all(self.assigned_work[node][scope].values()):
                del self.assigned_work[node][scope]

    return Scheduling(config, log)


def pytest_addoption(parser):
    parser.addoption(
        "--thorough",
        action="store_true",
        help="run every case of the large tables, not a part of them",
    )
    parser.addoption(
        "--scale",
        action="store_true",
        help="run the tests of many processes, machines and large data",
    )


def pytest_collection_modifyitems(config, items):
    """Tests marked `thorough`, and most cases of those marked `sampled`, run with --thorough
    alone; those marked `scale` with --scale alone.
    """
    left_out = set()
    if not config.getoption("--scale"):
        left_out |= {item for item in items if item.get_closest_marker("scale")}
    if not config.getoption("--thorough"):
        left_out |= {item for item in items if item.get_closest_marker("thorough")}
        left_out |= cases_not_sampled(items)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish():
    """What collection has made stays: the garbage collector need not look at it time and again."""
    gc.collect()
    gc.freeze()


def cases_not_sampled(items):
    """The cases of tests marked `sampled(n)` but for one in n.

    They are taken along diagonals of the table, since every n-th line of it could hold the same
    column each time. A case with a value of an argument that no case on them has stays as well, so
    that every value is met.
    """
    left_out = set()
    for one_in, cases in sampled_tables(items):
        values = numbered_values(cases)
        others = [i for i, row in enumerate(values) if sum(row.values()) % one_in]
        met = {value for i, row in enumerate(values) if i not in others for value in row.items()}
        for i in others:
            if met.issuperset(values[i].items()):
                left_out.add(cases[i])
            met.update(values[i].items())
    return left_out


def sampled_tables(items):
    """[(n, cases)] of the tests marked `sampled(n)`."""
    tables = {}
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            table = item.nodeid.partition("[")[0], mark.args[0]
            tables.setdefault(table, []).append(item)
    return [(one_in, cases) for (_, one_in), cases in tables.items()]


def numbered_values(cases):
    """[{argument: number of its value among those it takes in the table}], one for each case.

    They are counted here because `callspec.indices` holds the number of the case for every
    argument since pytest 8.
    """
    numbers, rows = {}, []
    for case in cases:
        row = {}
        for argument, value in case.callspec.params.items():
            known = numbers.setdefault(argument, {})
            row[argument] = known.setdefault(identity(value), len(known))
        rows.append(row)
    return rows


def identity(value):
    """What two equal arguments of a table share, whether or not they can be hashed."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


@pytest.fixture(scope="session")
def thorough(request):
    """Whether every case of a large table is to run."""
    return request.config.getoption("--thorough")


@pytest.fixture
def coadjoint(monkeypatch, capsys):
    """coadjoint("train", ...) -> exit code, what was printed, what was complained about."""

    from coadjoint.cli import program

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["coadjoint", *words])
        with pytest.raises(SystemExit) as end:
            program.main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return end.value.code, out, err

    return call


def pytest_terminal_summary(terminalreporter):
    """Sums what tests recorded with `record_property`; the workers of pytest-xdist hand it over
    with their reports.
    """
    totals = {"cases": 0, "skipped": 0}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name in totals and getattr(report, "when", "") == "call":
                    totals[name] += value
    if totals["cases"]:
        terminalreporter.write_line(
            f"gradient cases compared with the oracle: {totals['cases']} ({totals['skipped']} "
            "skipped as chaotic)"
        )
