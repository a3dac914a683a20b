"""The calls of a module of co.nn as CUDA graphs, with their derivatives of every order."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import cast

from torch import Tensor

from ..sweeps.engines.cuda.captured_function import CapturedFunctions, is_parameter
from ..sweeps.engines.cuda.captured_stages import Map


class CapturedModules(CapturedFunctions):
    """The captured calls of a module, by the shapes of their inputs."""

    def __init__(self, what: str = "this module", records: bool = True) -> None:
        super().__init__(what, records)

    def __call__(
        self, key: Hashable, f: Map, data: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """f(data, weights), by a CUDA graph from the third call with tensors of these shapes on.

        key: what else f depends on.
        """
        # A graph reads weights where they lie, and a computed one lies elsewhere at each call.
        stay_in_place = all(map(is_parameter, weights))
        replayed = self.replay(key, f, data, weights) if stay_in_place else None
        results = f(data, weights) if replayed is None else replayed
        return cast(Sequence[Tensor], results)  # the layers return no None
