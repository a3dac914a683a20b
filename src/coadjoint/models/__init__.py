"""Models: what to do with a trained network and the description of its data.

    model = co.load("runs/waves")
    model.predict(arrays)          # or a frame, or "new.csv"

This package imports `training` and the packages before it.

model       Model: predictions from files, arrays and frames; load: the model of a run folder
answers     outputs of a network as labels and numbers, in the form of the data
forecast, forecasting, continuing    the next steps of series, with intervals
future_times, held_out_rows          times after the last row; rows that were not trained on
rolling, reference_forecasts         forecasts from past rows, beside those without a network
forecast_page                        the page of a forecast
"""

from __future__ import annotations

from .model import Model, load

__all__ = ["Model", "load"]
