"""The notebooks, cell by cell, each in an empty folder; and what objects show in them."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import fedsolve as fs
from fedsolve.pages.templates import html_table
from tests.conftest import Dataset

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


def run_cell(text: str, name: str, scope: dict[str, Any]) -> Any:
    """The value of the cell's last expression, as a notebook would show it."""
    tree = ast.parse(text)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), scope)
    return None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), scope)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            shown = run_cell("".join(cell["source"]), path.name, scope)
            if hasattr(shown, "_repr_html_"):
                assert shown._repr_html_().startswith("<table>")
    if path.stem == "hospital-tables":
        assert scope["rounds"] == 17


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
