"""Module paths of version 0.6 keep working until 1.0, with a warning that names the new path."""

import importlib
import sys
import warnings

import pytest

import coadjoint as co

# What users could import by module path in 0.6, by module.
PUBLIC = {
    "batch": "Batch",
    "charts": "Chart",
    "config": "load_model predict",
    "costates": "Costates norm",
    "curriculum": "Easiest",
    "curvature": "Curvature conjugate_gradients",
    "directions": "Armijo DIRECTIONS Galvan Wolfe distance temporal",
    "files": "replacing",
    "formula": "Node tanh sigmoid pull push",
    "hessian_free": "HessianFree",
    "influence": "Influence",
    "initialisers": "initialise",
    "layout": "Layout lay_out",
    "losses": "LOSSES Loss",
    "network": "Network Trajectory",
    "online": "Learned learn",
    "parametrisations": "STRUCTURES",
    "penalties": "PENALTIES Penalty Steered linear log_ratio penalty",
    "readout": "Net Readout",
    "recording": "Recorded Tape record",
    "recurrence": "Recurrence",
    "report": "markdown write",
    "reservoir": "Reservoir",
    "ridge": "Ridge",
    "segments": "predict steady",
    "seq2seq": "EncoderDecoder",
    "settings": "dump load",
    "stack": "Stack",
    "steps": "STEPS",
    "streams": "File",
    "sweeps.derivatives": "SweepPlan affine Forward",
    "sweeps.reference": "adjoint forward tangent",
}


@pytest.fixture
def fresh(monkeypatch):
    """Old paths that were imported before are forgotten: the warning comes with the import."""
    for name in list(sys.modules):
        if name.removeprefix("coadjoint.") in co._MOVED:
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("module", PUBLIC)
def test_an_old_path_still_imports(module, fresh):
    with pytest.warns(DeprecationWarning, match=rf"coadjoint\.{module} has moved to coadjoint\."):
        found = importlib.import_module(f"coadjoint.{module}")
    for name in PUBLIC[module].split():
        homes = [importlib.import_module(f"coadjoint.{home}") for home in co._MOVED[module].split()]
        values = [getattr(home, name) for home in homes if hasattr(home, name)]
        assert values
        assert getattr(found, name) is values[0]


def test_the_warning_names_the_line_of_the_user(fresh):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import coadjoint.losses  # noqa: F401
    (warning,) = [w for w in caught if "has moved" in str(w.message)]
    assert warning.filename == __file__


@pytest.mark.parametrize("module", sorted(co._MOVED))
def test_every_row_of_the_table_leads_somewhere(module):
    for home in co._MOVED[module].split():
        assert importlib.import_module(f"coadjoint.{home}")


def test_names_that_never_were_are_refused(fresh):
    with (
        pytest.warns(DeprecationWarning, match="has moved"),
        pytest.raises(ImportError, match="nonsense"),
    ):
        from coadjoint.losses import nonsense  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"coadjoint\.nonsense"):
        importlib.import_module("coadjoint.nonsense")
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = co.nonsense


@pytest.mark.parametrize(
    "name", ["curriculum", "directions", "parametrisations", "ridge", "segments", "steps"]
)
def test_modules_that_were_attributes_of_the_package_warn(name, fresh, monkeypatch):
    monkeypatch.delitem(vars(co), name, raising=False)
    with pytest.warns(DeprecationWarning, match=f"coadjoint.{name} has moved"):
        assert getattr(co, name)


@pytest.mark.parametrize(
    "name", ["losses", "penalties", "initialisers", "curvature", "online", "report"]
)
def test_public_modules_do_not_warn(name, fresh, monkeypatch):
    monkeypatch.delitem(vars(co), name, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(co, name)


def test_a_public_module_that_was_imported_by_its_old_path_has_its_new_names(fresh):
    with pytest.warns(DeprecationWarning, match="has moved"):
        importlib.import_module("coadjoint.report")
    assert co.report.save is importlib.import_module("coadjoint.training.report").save
