"""Models: what to do with a trained network and the description of its data.

Example: the forecast of a series from Python; `co.load("runs/waves")` is the model of a run.

    >>> import numpy as np, coadjoint as co
    >>> series = np.sin(np.arange(200) / 5)
    >>> task = co.tasks.Data.of(series, kind="next", window=20)
    >>> net = co.Network("gru", inputs=1, hidden=4, outputs=1, readout="every")
    >>> model = co.models.Model(net, task)
    >>> model.predict(series[:50]).shape  # of each step the next one
    (50,)

This package imports `training` and the packages before it.

model       Model: predictions from files, arrays and frames; load: the model of a run folder
arguments   errors about data that name Python's arguments
export/     networks as files that other programs run: ONNX, or Python that needs torch alone
evaluating  metrics on labelled data, with confidence intervals
trained_on  whether these are the data of training
evaluation_page  the same as a page
bootstrap   metrics of weighted entries
stepping    one row at a time
answers     outputs of a network as labels and numbers, in the form of the data
forecast, forecasting, continuing    the next steps of series, with intervals
future_times, held_out_rows          times after the last row; rows that were not trained on
rolling, reference_forecasts         forecasts from past rows, beside those without a network
forecast_page                        the page of a forecast
explaining  Explanation: which steps and columns predictions come from, by
            attribution (gradients and integrated gradients), as a table, in words
            (explanation) and on a page (explained_page)
"""

from __future__ import annotations

from .model import Model, load

__all__ = ["Model", "load"]
