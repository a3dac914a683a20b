"""The tables of tools/mutants.py.

They say which files are mutated, which tests ought to notice, and which mutants are equivalent to
the source. Keys are files and folders below src/coadjoint (folders end with "/"). Where several fit
a file, the longest counts.
"""

from __future__ import annotations

# What is not mutated, and why. Everything else is, new files included.
NAMES = "names alone"
GPU = "runs on a GPU: `make test-gpu`"
DOOR = "words, pages and arguments; what they ask for is tested where it is done"
SPEED = "a matter of speed: what it makes is compared with the other engines"
OUTSIDE: dict[str, str] = {
    "cells/transport.py": DOOR,
    "cli/": DOOR,
    "diagnostics/charts.py": DOOR,
    "errors.py": DOOR,
    "gradients/captured.py": GPU,
    "networks/captured_runs.py": GPU,
    "nn/captured.py": GPU,
    "sweeps/checks.py": GPU,
    "sweeps/engines/c/": SPEED,
    "sweeps/engines/cuda/": GPU,
    "sweeps/engines/opaque.py": SPEED,
    "sweeps/memory.py": SPEED,
    "sweeps/pointers.py": DOOR,
    "sweeps/wrappers.py": DOOR,
    "tasks/files/source.py": DOOR,
    "training/display.py": DOOR,
    "training/environment.py": DOOR,
    "training/report/": DOOR,
    "training/schema_checks.py": DOOR,
    "training/schemas.py": DOOR,
    "training/tensor_header.py": DOOR,
    "training/settings/": DOOR,
    "training/signals.py": DOOR,
}

# Of these files only some parts are mutated.
PARTS: dict[str, set[str]] = {
    "sweeps/layout.py": {"Layout"},
}

# Files that have more mutants in the sample than others.
WEIGHT = {
    "cells/formula.py": 2,
    "cells/nodes.py": 2,
    "gradients/penalised.py": 2,
    "networks/trajectory.py": 2,
    "objectives/penalties.py": 2,
    "sweeps/adjoint_tangent.py": 4,
    "sweeps/differentiable.py": 4,
    "sweeps/engines/eager/in_place.py": 2,
    "sweeps/engines/eager/scaled_adjoint.py": 2,
}

# The tests of a file's mutants: those that are about it, and others that ought to notice.
KERNEL = ("sweeps/test_kernel.py", "house/test_errors.py")
SLOW = (
    "cells/test_formula.py", "cells/test_cells.py", "objectives/test_losses.py",
    "objectives/test_penalties.py",
    "networks/test_network.py", "gradients/test_gradients.py", "gradients/test_hold.py",
    "sweeps/test_identities.py",
    "sweeps/test_scale_free.py",
    "sweeps/test_differentiable.py", "sweeps/test_zeros.py", "training/test_learning.py",
)  # fmt: skip
FORECASTS = (("models/test_forecasting.py",), ("cli/test_forecast.py",))
STORED = (
    ("tasks/test_prepared.py", "tasks/test_prepared_arrays.py"),
    ("tasks/test_prediction_in_parts.py", "tasks/test_data_beyond_memory.py"),
)
TESTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cells/": (KERNEL, SLOW),
    "cells/steps.py": (("cells/test_steps.py",), ("networks/test_initialisers.py",)),
    "cells/structures.py": (("cells/test_structures.py",), ("cells/test_cells.py",)),
    "estimators/": (("estimators/test_estimators.py",), ("estimators/test_sklearn_checks.py",)),
    "models/": (("models/test_model.py",), ("models/test_evaluating.py",)),
    "models/bootstrap.py": (("models/test_evaluating.py",), ()),
    "models/evaluating.py": (("models/test_evaluating.py",), ("cli/test_evaluate.py",)),
    "models/evaluation_page.py": (("cli/test_evaluate.py",), ()),
    "models/stepping.py": (("models/test_stepping.py",), ()),
    "models/continuing.py": FORECASTS,
    "models/forecast.py": FORECASTS,
    "models/forecasting.py": FORECASTS,
    "models/future_times.py": FORECASTS,
    "models/held_out_rows.py": FORECASTS,
    "models/reference_forecasts.py": FORECASTS,
    "models/rolling.py": FORECASTS,
    "models/forecast_page.py": FORECASTS,
    "models/export/": (
        ("models/test_export_torch.py",),
        ("models/test_export_onnx.py",),
    ),
    "sweeps/": (KERNEL, SLOW),
    "sweeps/chunks.py": (("sweeps/test_row_products.py", "gradients/test_segments.py"), KERNEL),
    "sweeps/engines/parallel_scan.py": (("sweeps/test_scan.py",), ("cells/test_cells.py",)),
    "sweeps/engines/scan.py": (("sweeps/test_scan.py",), ("cells/test_cells.py",)),
    "objectives/": (KERNEL, SLOW),
    "objectives/batch.py": (
        ("gradients/test_gradients.py",),
        (
            "training/test_training.py",
            "gradients/test_segments.py",
            "tasks/test_tasks.py",
            "training/test_learning.py",
        ),
    ),
    "networks/": (KERNEL, SLOW),
    "networks/decoder_run.py": (
        ("networks/test_seq2seq.py", "gradients/test_hold.py"),
        ("networks/test_interface.py",),
    ),
    "networks/decoding.py": (("networks/test_seq2seq.py",), ()),
    "networks/expansions.py": (("networks/test_reservoir.py",), ()),
    "networks/initialisers.py": (
        ("networks/test_initialisers.py",),
        ("training/test_learning.py", "networks/test_reservoir.py"),
    ),
    "networks/layer_stack.py": (
        ("networks/test_stack.py",),
        ("networks/test_seq2seq.py", "networks/test_interface.py"),
    ),
    "networks/layers.py": (("nn/test_recording.py",), ("networks/test_stack.py", "nn/test_nn.py")),
    "networks/maps/": (
        ("networks/test_maps.py",),
        ("networks/test_thesis.py", "networks/test_chain.py"),
    ),
    "networks/reservoir.py": (("networks/test_reservoir.py",), ()),
    "networks/reservoir_weights.py": (("networks/test_reservoir.py",), ()),
    "networks/ridge.py": (("networks/test_reservoir.py",), ("training/test_learning.py",)),
    "networks/scaled_sources.py": (
        ("nn/test_recording.py",),
        ("networks/test_stack.py", "nn/test_nn.py"),
    ),
    "networks/seq2seq.py": (("networks/test_seq2seq.py",), ("networks/test_interface.py",)),
    "networks/stack.py": (
        ("networks/test_stack.py", "gradients/test_hold.py"),
        ("networks/test_seq2seq.py", "networks/test_interface.py"),
    ),
    "nn/": (("nn/test_nn.py",), ("nn/test_recording.py", "house/test_extras.py")),
    "nn/one_step.py": (("nn/test_one_step.py",), ("nn/test_nn.py",)),
    "nn/recording.py": (("nn/test_recording.py",), ("networks/test_stack.py", "nn/test_nn.py")),
    "gradients/": (KERNEL, SLOW),
    "gradients/influence.py": (("gradients/test_gradients.py",), ("training/test_online.py",)),
    "gradients/memory.py": (("gradients/test_segments.py",), ("sweeps/test_memory.py",)),
    "gradients/penalised.py": ((*KERNEL, "gradients/test_hold.py"), SLOW),
    "gradients/restoring.py": (("training/test_run_folders.py",), ("training/test_training.py",)),
    "gradients/segment_norms.py": (("gradients/test_segments.py",), ("sweeps/test_memory.py",)),
    "gradients/segment_parts.py": (("gradients/test_segments.py",), ("sweeps/test_memory.py",)),
    "gradients/segment_sums.py": (("gradients/test_segments.py",), ("sweeps/test_memory.py",)),
    "gradients/segment_sweeps.py": (
        ("gradients/test_segments.py", "gradients/test_hold.py"),
        ("sweeps/test_memory.py",),
    ),
    "gradients/segments.py": (
        ("gradients/test_segments.py", "gradients/test_hold.py"),
        ("sweeps/test_memory.py",),
    ),
    "optimisers/": (
        ("optimisers/test_optimisers.py",),
        ("optimisers/test_directions.py", "training/test_training.py"),
    ),
    "optimisers/conjugate_gradients.py": (
        ("optimisers/test_hessian_free.py",),
        ("optimisers/test_curvature.py",),
    ),
    "optimisers/chain_jacobian.py": (("optimisers/test_chain_optimisers.py",), ()),
    "optimisers/curvature.py": (
        ("optimisers/test_curvature.py", "optimisers/test_chain_optimisers.py"),
        ("optimisers/test_hessian_free.py", "optimisers/test_optimisers.py"),
    ),
    "optimisers/directions.py": (
        ("optimisers/test_directions.py", "optimisers/test_chain_optimisers.py"),
        ("optimisers/test_optimisers.py",),
    ),
    "optimisers/factory.py": (("optimisers/test_make_optimiser.py",), ("cli/test_config.py",)),
    "optimisers/hessian_free.py": (
        ("optimisers/test_hessian_free.py",),
        ("optimisers/test_optimisers.py",),
    ),
    "optimisers/step_rules.py": (
        ("optimisers/test_directions.py",),
        ("optimisers/test_optimisers.py",),
    ),
    "tasks/": (("tasks/test_data.py",), ("tasks/test_tasks.py", "tasks/test_readers.py")),
    "tasks/ahead.py": FORECASTS,
    "tasks/future_rows.py": FORECASTS,
    "tasks/array_chunks.py": (("tasks/test_prepared_arrays.py",), ("tasks/test_prepared.py",)),
    "tasks/array_files.py": STORED,
    "tasks/chunks.py": STORED,
    "tasks/prepare_checks.py": STORED,
    "tasks/prepared.py": STORED,
    "tasks/prepared_description.py": STORED,
    "tasks/prepared_words.py": STORED,
    "tasks/preparing.py": STORED,
    "tasks/stored_gaps.py": STORED,
    "tasks/stored_prediction.py": STORED,
    "tasks/stored_rows.py": STORED,
    "tasks/stored_sets.py": STORED,
    "tasks/uneven.py": STORED,
    "tasks/asked.py": (("tasks/test_asked_rows.py",), ("cli/test_predicted_rows.py",)),
    "tasks/data.py": (("tasks/test_data.py",), ("tasks/test_own_samples.py",)),
    "tasks/denoising.py": (("tasks/test_samples.py",), ()),
    "tasks/description.py": (("tasks/test_data.py",), ("tasks/test_own_samples.py",)),
    "tasks/digits.py": (("tasks/test_tasks.py", "tasks/test_samples.py"), ()),
    "tasks/files/": (("tasks/test_readers.py",), ("tasks/test_data.py", "tasks/test_tasks.py")),
    "tasks/files/images.py": (("tasks/test_own_samples.py",), ()),
    "tasks/files/kept.py": (
        ("tasks/test_asked_rows.py", "cli/test_predicted_rows.py"),
        (),
    ),
    "tasks/files/samples.py": (("tasks/test_own_samples.py",), ()),
    "tasks/files/scaling.py": (("training/test_online.py",), ()),
    "tasks/files/stream.py": (("training/test_online.py",), ()),
    "tasks/frames.py": (("tasks/test_data_of.py",), ("models/test_model.py",)),
    "tasks/memory.py": (("tasks/test_data_of.py",), ("models/test_model.py",)),
    "tasks/music.py": (("tasks/test_tasks.py",), ("tasks/test_data.py",)),
    "tasks/generated.py": (("tasks/test_tasks.py",), ()),
    "tasks/marked.py": (("tasks/test_tasks.py", "tasks/test_variants.py"), ()),
    "tasks/synthetic.py": (("tasks/test_tasks.py", "tasks/test_variants.py"), ()),
    "tasks/task.py": (
        ("tasks/test_tasks.py", "tasks/test_samples.py"),
        ("training/test_training.py", "tasks/test_data.py"),
    ),
    "tasks/transduction.py": (("tasks/test_tasks.py",), ("networks/test_seq2seq.py",)),
    "classics/": (("classics/test_perceptron.py", "classics/test_hopfield.py"), ()),
    "diagnostics/": (
        ("diagnostics/test_diagnostics.py", "diagnostics/test_chain_diagnostics.py"),
        ("training/test_learning.py",),
    ),
    "diagnostics/convergence.py": (("diagnostics/test_convergence.py",), ()),
    "diagnostics/depth.py": (("diagnostics/test_chain_diagnostics.py",), ()),
    "diagnostics/outputs.py": (
        ("diagnostics/test_chain_diagnostics.py",),
        ("diagnostics/test_diagnostics.py",),
    ),
    "training/": (
        ("training/test_training.py",),
        (
            "training/test_run_folders.py",
            "optimisers/test_optimisers.py",
            "training/test_learning.py",
        ),
    ),
    "training/curriculum.py": (("training/test_learning.py",), ("optimisers/test_optimisers.py",)),
    "training/files.py": (("training/test_run_folders.py",), ("training/test_online.py",)),
    "training/json_rows.py": (("training/test_run_folders.py",), ("training/test_online.py",)),
    "training/learning.py": (("training/test_online.py",), ()),
    "training/online.py": (("training/test_online.py",), ()),
    "training/predict.py": (
        ("training/test_predict.py", "tasks/test_data.py"),
        ("cli/test_config.py",),
    ),
    "training/prediction_files.py": (("cli/test_predicted_rows.py",), ("tasks/test_data.py",)),
    "models/attribution.py": (("models/test_attribution.py",), ("models/test_explaining.py",)),
    "models/explaining.py": (("models/test_explaining.py",), ("cli/test_explain.py",)),
    "models/explanation.py": (("models/test_explaining.py",), ("cli/test_explain.py",)),
    "models/explained_page.py": (("cli/test_explain.py",), ()),
    "training/loggers.py": (("training/test_loggers.py",), ()),
    "training/run_folder.py": (
        ("training/test_run_folders.py",),
        ("training/test_training.py", "training/test_online.py"),
    ),
    "training/storage.py": (
        ("training/test_run_folders.py",),
        ("training/test_training.py", "training/test_online.py"),
    ),
}

# Code that only words an error, or only prepares one.
WORDING = {
    "__repr__", "extra_repr", "describe_place", "__getattr__", "__bool__",
    "__torch_function__", "check_range", "time_of_row",
    "raise_error", "vmap_error",
    "same_shape", "check_penalty", "named", "register", "is_transformed", "blame_penalty",
    "describe_nonfinite", "locate_nonfinite", "resume_hint",
    "describe", "describe_environment",
    "refuse_states", "refuse", "folder_name", "save_interrupted", "say",
}  # fmt: skip

GROWTH = (
    "how many steps share an exponent is a matter of speed: a block that leaves the safe "
    "range is done again, shorter"
)
BLOCKS = (
    "the exponent a block shares is a matter of speed: one that does not suit is refused and "
    "found step by step"
)
UNASKED = (
    "a gradient that nobody asks for is computed and dropped, or None is given where "
    "nothing is asked for"
)
# Mutants that no test can kill because they mean the same: (file, rule or function, a piece of
# 'line before -> line after') -> why.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    ("classics/hopfield.py", "Hopfield.path", "state @ self._sums"): "the weights are symmetric",
    ("classics/perceptron.py", "Perceptron.fit", "row @ w"): "vectors: w @ row is row @ w",
    ("diagnostics/finding.py", "fitted_slope", "y @ x"): "vectors: x @ y is y @ x",
    ("sweeps/engines/eager/scaled_adjoint.py", "ScaledAdjoint.run", "hi - begin == size"): GROWTH,
    ("sweeps/engines/eager/scaled_adjoint.py", "ScaledAdjoint.run",
        "size = min(2 * size, LONGEST_BLOCK)"): GROWTH,
    ("sweeps/engines/eager/scaled_adjoint.py", "ScaledAdjoint._shared_exponents",
        "k_new = torch.where(k_new == NO_EXPONENT, k_later, k_new) ->"): BLOCKS,
    ("sweeps/engines/eager/scaled_adjoint.py", "ScaledAdjoint._shared_exponents",
        "k_new = torch.maximum(k_pulled, "): BLOCKS,
    ("sweeps/engines/eager/scaled_adjoint.py", "ScaledAdjoint._shared_exponents",
        "k_pulled[:n] = "): BLOCKS,
    ("sweeps/engines/eager/linear_loop.py", "LinearLoop.__init__",
        " size = max("): "how many steps are prepared at once is a matter of speed",
    ("sweeps/engines/denormals.py", "flush_denormals",
        "set_flush_denormal(True) -> pass"): "denormals cost time and change nothing here",
    ("sweeps/engines/eager/linear_loop.py", "skip-branch",
        "if not e.uses_W: -> if False:"): "a product that goes nowhere costs time alone",
    ("sweeps/engines/eager/in_place.py", "skip-branch",
        "if not e.uses_W: -> if False:"): "likewise",
    ("sweeps/differentiable.py", "skip-branch", "if ((saved.v is not None))"): UNASKED,
    ("sweeps/differentiable.py", "skip-branch", "if ((saved.p is not None))"): UNASKED,
    ("sweeps/differentiable.py", "skip-branch", "if (need_"): UNASKED,
    ("sweeps/differentiable.py", "skip-branch", "if ((W is not None)):"): UNASKED,
    ("sweeps/adjoint_tangent.py", "skip-branch", "if (need."): UNASKED,
    ("sweeps/adjoint_tangent.py", "skip-branch", "if ((W is not None)):"): UNASKED,
    ("sweeps/adjoint_tangent.py", "skip-statement",
        "mark_non_differentiable(k)"): "integers have no gradient anyway",
    ("sweeps/pointwise.py", "pulled",
        "summed=self.uniform,"): "`summed` is only asked about the outputs",
    ("cells/cell.py", "Cell.step",
        "self.side} -> pass"): "base is 0 for a gate that has a side array",
    ("cells/cell.py", "Cell.step",
        "z |= {g: z[g] for"): "base is 0 for a gate that has a side array",
    ("cells/cell.py", "Cell.step",
        "z |= {g: (z[g] - v[g])"): "base is 0 for a gate that has a side array",
    ("sweeps/rows.py", "skip-branch",
        "if self.uniform: -> if False:"): "samples of one length take the general path",
    ("networks/maps/dense.py", "nearly_equal",
        "eps * (size))"): "it matters where a sum happens to be near zero",
    ("networks/trajectory.py", "flip-sign", "h - torch.zeros_like(h)"): "minus zero",
    ("networks/trajectory.py", "skip-branch",
        '"every") and (not is_given))'): "s is never None there",
    ("gradients/rtrl.py", "Stream.advance", "self.t += 1"): "only words an error",
    ("objectives/losses.py", "_huber",
        "torch.where(e < delta"): "both sides and their slopes agree at e = delta",
    ("cells/nodes.py", "order", "stack"): "any order with arguments first will do",
    ("cells/program.py", "product_to_fuse",
        "for argument in node.args"): "which of two products is fused is a matter of speed",
    ("cells/nodes.py", "skip-branch",
        "a.order <= b.order"): "sums and products commute; the order only helps sharing",
    ("cells/nodes.py", "comparison",
        "a.order <= b.order"): "sums and products commute; the order only helps sharing",
    ("cells/nodes.py", "add", "if b is ZERO: -> if False:"): "x + 0 is computed instead of x",
    ("sweeps/engines/scan.py", "affine_step",
        "-> return AffineStep(A, shared, ((len(A) == 1)), step, links)"): (
            "complex numbers are scanned as the matrices they are, slower"),
    ("networks/reservoir.py", "Reservoir._examples",
        "-> lead = [*run.mask[:-1].shape]"): ("without its first or its last row, a mask has the "
            "same shape"),
    ("networks/seq2seq.py", "skip-branch",
        '"dtype": (dtype), "device"'): "whatever is made takes torch's default for None",
}  # fmt: skip

SHAPES = {
    "new_empty",
    "new_zeros",
    "new_full",
    "empty",
    "zeros",
    "split",
    "chunk",
    "unflatten",
    "expand",
    "isinstance",
}
PAIRS = {
    frozenset(p.split())
    for p in (
        "lam mu",
        "nu m",
        "lam delta",
        "mu nu",
        "glam gdelta",
        "into_a into_x",
        "z v",
        "base side",
        "g ga",
        "dg dga",
        "s s_last",
        "dlam ddelta",
        "x last",
        "saved.a saved.v",
    )
}


def row_of(table: dict, file: str):
    """The row of a table that counts for a file: its own, or that of the innermost folder; None if
    there is none.
    """
    fits = [key for key in table if file == key or (key.endswith("/") and file.startswith(key))]
    return table[max(fits, key=len)] if fits else None
