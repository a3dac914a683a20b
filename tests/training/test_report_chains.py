"""Pages of chains speak of layers and samples, and show images and reconstructions."""

import copy
import json
import math

import pytest
import torch
from chain_folders import CAPTIONED, restored, write_chain, write_chain_comparison
from test_report import PAYLOADS, SMALL, edit, page_of, write_compare, write_run

import coadjoint as co
from coadjoint.training.report import read

pytestmark = pytest.mark.slow

WORDS_OF_TIME = ("sequence", "time step", "at time", "through time", "state to", "recurrent", "λ_T")


def all_words(page):
    """The text of a page, and that of its figures."""
    return page.text + json.dumps(page.figures, ensure_ascii=False)


@pytest.mark.parametrize("layers", [3, 30])
def test_the_page_of_a_chain_speaks_of_layers(tmp_path, layers):
    page = page_of(write_chain(tmp_path, layers=layers, pictures=CAPTIONED))
    words = all_words(page)
    for word in WORDS_OF_TIME:
        assert word not in words, word
    for said in (
        "digits-flat · chain 64x30 · plain backpropagation",
        "method plain backpropagation",
        "loss per sample",
        "on samples that are not used for training",
        "Costates through depth",
        "how much of the error signal reaches each layer",
        "log₁₀ (‖λ₀‖ / ‖λ_L‖)",
        "decay of the costates, log₁₀ ‖λ₀‖/‖λ_L‖, first → last",
        "reaches the input unchanged",
        "maps.k",
    ):
        assert said in words, said
    assert "pectral radius" not in words
    assert page.figures["costates"]["axis"] == "layer"


def test_a_chain_is_known_by_its_probes_or_its_settings(tmp_path):
    write_chain(tmp_path / "python", config="")
    (tmp_path / "python/config.yaml").unlink()
    assert "loss per sample" in all_words(page_of(tmp_path / "python"))
    write_chain(tmp_path / "dae", config="autoencoder: [32, 8]")
    (tmp_path / "dae/metrics.jsonl").write_text('{"kind":"train","step":1,"loss":1.5}\n')
    words = all_words(page_of(tmp_path / "dae"))
    assert "autoencoder 32, 8 · plain backpropagation" in words
    assert "loss per sample" in words


def test_a_probe_that_overflows_leaves_the_axis(tmp_path):
    write_chain(tmp_path, config="")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind":"probe","step":80,"t":[],"gradients":{},"fault":"overflow"}\n')
    assert page_of(tmp_path).figures["costates"]["axis"] == "layer"


def test_few_parameters_have_curves_and_many_have_heatmaps(tmp_path):
    few = page_of(write_chain(tmp_path / "few", layers=4)).figures
    assert [series["name"] for series in few["norms"]["series"]][:2] == ["maps.0.W", "maps.0.b"]
    assert "norms-0" not in few
    many = page_of(write_chain(tmp_path / "many", layers=150)).figures
    assert "norms" not in many
    for k, (letter, shift) in enumerate((("W", 0), ("b", -1))):
        figure = many[f"norms-{k}"]
        assert figure["title"] == f"Gradient of {letter} by layer"
        assert figure["t"] == list(range(1, 151))
        assert figure["steps"] == [0, 20, 40, 60]
        expected = [-0.3 * (1 - 20 / 60) * (150 - i) + shift for i in range(150)]
        assert figure["cells"][1] == pytest.approx(expected, abs=0.01)


def test_norms_of_a_resumed_run_are_the_later_ones(tmp_path):
    write_chain(tmp_path)
    rows = read.read_rows(tmp_path / "metrics.jsonl")
    probe = next(row for row in reversed(rows) if row["kind"] == "probe")
    last = copy.deepcopy(probe)
    last["gradients"]["maps.0.W"] = 1e5
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps(last) + "\n")
    assert page_of(tmp_path).figures["norms-0"]["cells"][-1][0] == 5


def test_parameters_of_own_maps_share_a_heatmap_by_their_last_name(tmp_path):
    write_chain(tmp_path)
    rows = read.read_rows(tmp_path / "metrics.jsonl")
    for row in rows:
        if row["kind"] == "probe":
            row["gradients"] |= {"maps.3.inner.W": 3.0, "maps.3.W": 4.0, "maps.1.0.weight": 10.0}
            row["gradients"] |= {"scale": 0.5, "maps.x.W": 1, "maps.99999.W": 1}
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    figures = page_of(tmp_path).figures
    assert figures["norms-0"]["cells"][0][3] == pytest.approx(math.log10(5), abs=1e-3)
    weight = figures["norms-2"]
    assert weight["title"] == "Gradient of weight by layer"
    assert weight["t"] == list(range(1, 31))
    assert weight["cells"][0] == [None, 1, *([None] * 28)]
    names = [series["name"] for series in figures["norms"]["series"]]
    assert names == ["scale", "maps.x.W", "maps.99999.W"]


def test_a_layer_without_parameters_is_blank(tmp_path):
    write_chain(tmp_path)
    rows = read.read_rows(tmp_path / "metrics.jsonl")
    for row in rows:
        if row["kind"] == "probe":
            row["temporal"][4] = None
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert "4 values zero or without parameters, left blank." in page_of(tmp_path).text


def test_pages_of_sequences_keep_their_words(tmp_path):
    page = page_of(write_run(tmp_path, **SMALL))
    assert "axis" not in page.figures["costates"]
    assert "loss per sequence" in all_words(page)
    assert "layer" not in page.text


def test_classified_images_are_drawn_with_target_and_prediction(tmp_path):
    page = page_of(write_chain(tmp_path, pictures=CAPTIONED))
    figure = page.figures["pictures"]
    assert figure["rows"] == CAPTIONED["rows"]
    assert figure["captions"][0] == {"target": "four", "prediction": "nine", "right": False}
    assert "below each: its target, then the prediction. Black: 0 or less; white: 1" in page.text
    assert "Samples of the test set as text" in page.text


def test_reconstructions_are_drawn_without_captions(tmp_path):
    page = page_of(write_chain(tmp_path, pictures=restored()))
    figure = page.figures["pictures"]
    labels = [row["label"] for row in figure["rows"]]
    assert labels == ["noisy input", "reconstruction", "clean target"]
    assert figure["captions"] == []
    assert "Reconstructions" in page.text


def test_scaled_pictures_say_so(tmp_path):
    pictures = {**CAPTIONED, "scaled_from": [200, 100]}
    page = page_of(write_chain(tmp_path, pictures=pictures))
    assert "Drawn with 2 x 2 pixels; the images have 200 x 100." in page.text


def test_a_run_without_pictures_has_a_table(tmp_path):
    page = page_of(write_chain(tmp_path))
    assert "pictures" not in page.figures
    assert "Samples of the test set id target prediction correct" in page.text


def harmed(**changes):
    return {**CAPTIONED, **changes}


IMAGES = CAPTIONED["rows"][0]["images"]
DAMAGED = [
    "<svg onload=alert(1)>",
    [],
    {},
    harmed(size=[1, 2]),
    harmed(size=[2, 2, 2]),
    harmed(size=[1, 0, 4]),
    harmed(size=[1, 2, 10**9]),
    harmed(size=[1, 64, 64]),
    harmed(size="1x2x2"),
    harmed(range=[0, 0]),
    harmed(range=[0, "NaN"]),
    harmed(range=[0]),
    harmed(range=[0, 10**400]),
    harmed(rows=[]),
    harmed(rows=[{"label": "input", "images": []}]),
    harmed(rows=[{"label": "input", "images": [[0, 0, 0]]}]),
    harmed(rows=[{"label": "input", "images": [[0, 0, 0, 256]]}]),
    harmed(rows=[{"label": "input", "images": [[0, 0, 0, -1]]}]),
    harmed(rows=[{"label": "input", "images": [[0, 0, 0, 0.5]]}]),
    harmed(rows=[{"label": "input", "images": [[0, 0, 0, True]]}]),
    harmed(rows=[{"label": "input", "images": [[0, 0, 0, "<b>"]]}]),
    harmed(rows=[{"label": ["input"], "images": IMAGES}]),
    harmed(rows=[{"label": "x" * 101, "images": IMAGES}]),
    harmed(rows=[{"label": "input", "images": IMAGES * 5}]),
    harmed(rows=[{"label": "a", "images": IMAGES}, {"label": "b", "images": IMAGES[:1]}]),
    harmed(rows=[{"label": "input", "images": IMAGES}] * 5),
    harmed(scaled_from=[1]),
    harmed(scaled_from=["<b>", 1]),
]


@pytest.mark.parametrize("pictures", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_pictures_are_noted_and_not_drawn(tmp_path, pictures):
    page = page_of(write_chain(tmp_path, pictures=pictures))
    assert "pictures" not in page.figures
    assert "The pictures in result.json are damaged:" in page.text
    assert "Samples of the test set id target" in page.text
    assert page.source.count("<script") == 2


@pytest.mark.parametrize("payload", PAYLOADS)
def test_words_in_pictures_become_no_markup(tmp_path, payload):
    def plant(folder, word):
        pictures = {**CAPTIONED, "rows": [{"label": word, "images": IMAGES}]}
        write_chain(folder, pictures=pictures)
        change = {"target": word, "prediction": word}
        edit(folder / "result.json", lambda result: result["examples"][0].update(change))
        return page_of(folder)

    expected = plant(tmp_path / "good", "harmless")
    page = plant(tmp_path / "bad", payload)
    assert page.elements == expected.elements
    assert "pictures" in page.figures


def test_long_captions_are_cut(tmp_path):
    write_chain(tmp_path, pictures=CAPTIONED)
    change = {"prediction": "x" * 500}
    edit(tmp_path / "result.json", lambda result: result["examples"][0].update(change))
    assert page_of(tmp_path).figures["pictures"]["captions"][0]["prediction"] == "x" * 59 + "…"


def test_comparisons_of_chains_draw_costates_over_layers(tmp_path):
    page = page_of(write_chain_comparison(tmp_path))
    before = page.figures["depth-before"]
    assert before["x"] == "layer"
    assert [series["colour"] for series in before["series"]] == [0, 0, 1, 1]
    assert before["series"][0]["name"] == "plain, seed 0"
    assert before["series"][0]["x"] == list(range(31))
    assert before["series"][2]["x"] == list(range(11))
    assert before["series"][0]["y"][0] == pytest.approx(-9)
    after = page.figures["depth-after"]
    assert set(after["series"][0]["y"]) == {0}
    assert "1 run at a time" in page.text
    assert "one mark per seed Costates" in page.text
    for word in WORDS_OF_TIME:
        assert word not in all_words(page), word


def test_comparisons_of_recurrent_networks_have_no_layers(tmp_path):
    figures = page_of(write_compare(tmp_path, seeds=1, steps=300)).figures
    assert not any(name.startswith("depth") for name in figures)


def test_a_trained_chain_has_a_page(tmp_path):
    torch.manual_seed(0)
    net = co.Chain.mlp(64, [16] * 5, 10, output="softmax")
    co.train(net, co.tasks.make("digits-flat"), steps=4, every=2, folder=tmp_path)
    page = page_of(tmp_path)
    assert math.prod(page.figures["pictures"]["size"]) == 64
    assert "norms-1" in page.figures
    for word in WORDS_OF_TIME:
        assert word not in all_words(page), word
