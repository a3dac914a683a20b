"""Reports: a run, comparison, search or diagnosis folder as one offline HTML page, or as Markdown.

text             text and numbers made safe to show
wording          words for time steps and sequences, or for layers and samples
curves           curves of many points made small
read             the content of run folders, however damaged
comparison       methods on tasks, and the table that terminal, page and Markdown share
figures          lines, heatmaps, dots and pictures, for the page's script
run_figures      the figures of a run
parameter_names  names of parameters in words
answers          what a run predicts for its held-out data
confusion        classes and what they are taken for
prediction_figures  numbers that were predicted, their errors, and series
prediction_section  the section with all of these
picture_figure   held-out images and reconstructions
baseline_table   the network beside baselines
depth_figures    costates over layers, of the chains of a comparison
page_parts       tables, sections and pages, for the template
run_again        the commands that make a run again, or continue it
sample_section   what a network of symbols writes by itself
data_section     what was read from the user's own files
run_page         the page of a run
diagnosis_page   the page, or the section, of a diagnosis
comparison_page  the page of a comparison
parallel_figure  the settings and values of many trials at once
study_page       the page of a search for settings
pages            the HTML page; page.html, page.css and page.js lie beside it
summary          the tables of a comparison as Markdown
diagnoses        diagnoses written to a folder

Example:
    >>> import coadjoint as co
    >>> task = co.tasks.make("addition", length=10)
    >>> net = co.networks.make("elman", inputs=task.inputs, outputs=task.outputs, hidden=4)
    >>> run = co.train(net, task, steps=2, tests=10, confirm=10, folder="runs/small")
    >>> co.report.write("runs/small").name
    'report.html'
"""

from __future__ import annotations

from .diagnoses import save
from .pages import write
from .read import read_rows
from .summary import markdown

__all__ = ["markdown", "read_rows", "save", "write"]
