"""Forty gradients keep the values in tests/data/gradients.json (`tools/digests.py --write`).

Bits differ between processors and compilers, so the comparison is to 1e-12 of each array's norm.
`tools/digests.py` without arguments compares bits on one machine.
"""

from __future__ import annotations

import importlib.util
import json

import pytest

from paths import DATA, ROOT

spec = importlib.util.spec_from_file_location("digests", ROOT / "tools" / "digests.py")
digests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(digests)
COMMITTED = json.loads((DATA / "gradients.json").read_text())


def test_the_file_has_every_case():
    assert list(COMMITTED) == [" ".join(case) for case in digests.CASES]


@pytest.mark.parametrize("case", digests.CASES, ids=" ".join)
def test_a_gradient_keeps_its_values(case):
    found = digests.gradient(*case)
    committed = COMMITTED[" ".join(case)]
    assert list(found) == list(committed)
    for name, y in found.items():
        norm, *products = committed[name]
        now, *here = digests.projections(y)
        assert now == pytest.approx(norm, rel=1e-12, abs=0)
        assert here == pytest.approx(products, rel=0, abs=1e-12 * norm)


def test_a_changed_entry_is_noticed():
    found = digests.gradient("elman", "cpu", "penalised")["W"]
    changed = found.clone()
    changed[1, 2] *= 1 + 1e-9
    norm, *products = digests.projections(found)
    _, *others = digests.projections(changed)
    assert others != pytest.approx(products, rel=0, abs=1e-12 * norm)
