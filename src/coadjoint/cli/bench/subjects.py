"""What can be measured, by the names of --cells."""

from __future__ import annotations

from .mlp import MLP, MlpProblem
from .problems import FORMULAS, MODULES, ModuleProblem, NetworkProblem

Problem = NetworkProblem | ModuleProblem | MlpProblem

SUBJECTS: dict[str, type[NetworkProblem] | type[ModuleProblem] | type[MlpProblem]] = {
    **dict.fromkeys(MODULES, NetworkProblem),
    **dict.fromkeys(FORMULAS, ModuleProblem),
    MLP: MlpProblem,
}
