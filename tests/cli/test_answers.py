"""`fedsolve evaluate`, `info` and probabilities of `predict`, as people would use them."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from sklearn import metrics
from sklearn.datasets import load_breast_cancer

import fedsolve as fs
from tests import browser
from tests.command import document, fedsolve, refused

COLUMNS = ["mean radius", "mean texture", "mean smoothness", "worst radius", "worst texture", "<b>worst"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A table in two files, and a calibrated model of the first."""
    path = tmp_path_factory.mktemp("answers")
    data = load_breast_cancer()
    features, labels = data.data[:, [0, 1, 4, 20, 21, 27]], data.target_names[data.target]
    order = np.random.default_rng(0).permutation(len(labels))
    for name, rows in (("train", order[:400]), ("test", order[400:])):
        with open(path / f"{name}.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*COLUMNS, "diagnosis"])
            writer.writerows([*features[row].tolist(), labels[row]] for row in rows)
    fedsolve("schema", path / "train.csv", "--label", "diagnosis", "--out", path / "s.toml")
    words = ("--schema", path / "s.toml", "--method", "afl", "--ridge", "1", "--clients", "4")
    told = document("train", path / "train.csv", *words, "--out", path / "m.safetensors")
    assert told["exchanges"] == 1 + 1 + 4 + 1
    assert told["calibration"]["held_out_rows"] > 40
    return path


def test_predictions_with_probabilities(folder):
    words = ("predict", folder / "m.safetensors", folder / "test.csv")
    rows = list(csv.DictReader(io.StringIO(fedsolve(*words, "--probabilities").stdout)))
    assert list(rows[0]) == ["row", "label", "probability_benign", "probability_malignant"]
    told = document(*words, "--probabilities", "--scores")
    assert np.allclose(
        [float(row["probability_malignant"]) for row in rows], np.array(told["probabilities"])[:, 1]
    )
    assert "scores" in told
    assert np.allclose(np.sum(told["probabilities"], axis=1), 1.0)


def test_evaluate_tells_everything(folder, tmp_path):
    page = tmp_path / "page.html"
    words = ("evaluate", folder / "m.safetensors", folder / "test.csv")
    told = document(*words, "--sensitivity", "0.9", "--importance", "--html", page)
    predicted = document("predict", *words[1:], "--probabilities")
    with open(folder / "test.csv") as file:
        labels = [row["diagnosis"] for row in csv.DictReader(file)]
    true = np.array(labels) == "malignant"
    second = np.array(predicted["probabilities"])[:, 1]
    assert abs(told["auc"] - metrics.roc_auc_score(true, second)) <= told["auc_bound"] + 1e-12
    assert told["log_loss"] == pytest.approx(metrics.log_loss(true, second))
    assert told["accuracy"] == np.mean(np.array(predicted["labels"]) == labels)
    limit = told["threshold"]
    assert limit["probability"] == fs.load_model(folder / "m.safetensors").threshold(0.9)
    assert limit["sensitivity"] == pytest.approx(np.mean(second[true] >= limit["probability"]))
    assert {one["column"] for one in told["importance"]} == set(COLUMNS)
    assert told["per_class"][1]["class"] == "malignant"  # as before
    text = fedsolve(*words, "--sensitivity", "0.9").stdout
    assert "threshold for malignant" in text
    assert "balanced accuracy" in text
    html = page.read_text()
    assert "<svg" in html
    assert "<b>worst" not in html
    again = tmp_path / "again.html"
    document(*words, "--sensitivity", "0.9", "--importance", "--html", again)
    assert again.read_text() == html


def test_evaluate_refuses_what_does_not_go_together(folder, tmp_path):
    model, data = folder / "m.safetensors", folder / "test.csv"
    words = ("evaluate", model, data)
    refused(fedsolve(*words, "--column", "mean radius"), 2, "--column says whose --importance")
    refused(fedsolve(*words, "--sensitivity", "1.5"), 2, "--sensitivity")
    refused(fedsolve(*words, "--importance", "--column", "weight"), 2, "no column called 'weight'")
    refused(fedsolve(*words, "--html", data), 4, "would be lost")
    plain = tmp_path / "plain.safetensors"
    document("train", "digits", "--method", "afl", "--ridge", "1", "--no-calibrate", "--out", plain)
    refused(fedsolve("evaluate", plain, "digits", "--sensitivity", "0.9"), 2, "rows that were held out")
    assert "not calibrated" in fedsolve("evaluate", plain, "digits").stdout


def test_info_is_the_card_of_a_model(folder, tmp_path):
    told = document("info", folder / "m.safetensors")
    assert told["classes"] == ["benign", "malignant"]
    assert [column["name"] for column in told["schema"]["columns"]] == COLUMNS
    assert told["training"]["rows"] == 400
    assert told["training"]["exchanges"] == sum(entry["exchanges"] for entry in told["training"]["history"])
    assert told["training"]["cohort"] == [f"client-{k}" for k in range(4)]
    assert told["training"]["versions"]["fedsolve"] == fs.__version__
    assert 0.5 < told["calibration"]["metrics"]["auc"] <= 1
    assert "Apache License 2.0" in told["licence"]
    text = fedsolve("info", folder / "m.safetensors").stdout
    for words in ("afl", "mean radius", "client-3", "slope", "standardised by sums"):
        assert words in text
    card = tmp_path / "MODEL.md"
    assert fedsolve("info", folder / "m.safetensors", "--markdown", "--out", card).exit_code == 0
    assert "## Training" in card.read_text()
    assert "\\<b\\>worst" in card.read_text()
    # A model that Python saved has no record of its training, and says what it is all the same.
    model = fs.AFL(ridge=1.0).fit(fs.LocalFederation.from_arrays(np.eye(4), [0, 1, 0, 1], np.zeros(4, int)))
    model.save(tmp_path / "plain.safetensors")
    told = document("info", tmp_path / "plain.safetensors")
    assert (told["training"], told["calibration"], told["features"]) == (None, None, 4)
    both = fedsolve("info", folder / "m.safetensors", "--json", "--markdown")
    assert (both.exit_code, "choose one" in both.stderr) == (2, True)
    refused(fedsolve("info", folder / "m.safetensors", "--out", card), 2, "--out is for --markdown")
    refused(
        fedsolve("info", folder / "m.safetensors", "--markdown", "--out", folder / "m.safetensors"), 4, "lost"
    )
    refused(fedsolve("info", folder / "none"), 4, "cannot read")


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(browser.FOUND is None, reason=browser.MISSING)
def test_the_page_in_chromium(folder, tmp_path):
    page = tmp_path / "page.html"
    words = ("evaluate", folder / "m.safetensors", folder / "test.csv", "--sensitivity", "0.9")
    told = json.loads(fedsolve(*words, "--importance", "--html", page, "--json").stdout)
    with browser.Browser() as running:
        colours = set()
        for width, dark in ((1280, False), (1280, True), (390, False)):
            shown = running.open(page, width=width, dark=dark)
            assert shown.problems() == []
            assert len(shown.requests()) == 1
            assert shown.evaluate("document.documentElement.scrollWidth") <= width
            assert shown.evaluate("document.querySelectorAll('figure svg').length") == 4
            assert f"{told['auc']:.4f}" in shown.text()
            assert "sensitivity there" in shown.text()
            colours.add(shown.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert len(colours) == 2
