"""Runs the notebooks of examples/notebooks and stores what their cells show.

    python -m benchmarks.notebooks [NAME ...]

A cell's printed text, the value of its last expression and its figures become its outputs, as in Jupyter.
Every notebook runs twice in one folder, and both runs must show the same text. Cells with the tag "varies"
are left out of that: they show times or last digits.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import io
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"


def run(notebook: dict[str, Any], name: str, folder: Path) -> list[list[dict[str, Any]]]:
    """The outputs of all code cells, run from top to bottom in a folder."""
    with contextlib.chdir(folder), matplotlib.rc_context():
        scope: dict[str, Any] = {"__name__": "__main__"}
        return [_outputs("".join(cell["source"]), name, scope) for cell in code_cells(notebook)]


def code_cells(notebook: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (cell for cell in notebook["cells"] if cell["cell_type"] == "code")


def texts(notebook: dict[str, Any], outputs: list[list[dict[str, Any]]]) -> list[list[str]]:
    """What cells show as text, without those that differ from run to run."""
    return [
        []
        if "varies" in cell["metadata"].get("tags", [])
        else ["".join(each.get("text") or each["data"].get("text/plain", "")) for each in shown]
        for cell, shown in zip(code_cells(notebook), outputs, strict=True)
    ]


def _outputs(text: str, name: str, scope: dict[str, Any]) -> list[dict[str, Any]]:
    tree = ast.parse(text)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), scope)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), scope)
    found: list[dict[str, Any]] = []
    if printed.getvalue():
        found.append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
    if value is not None:
        data = {"text/plain": _lines(repr(value))}
        if hasattr(value, "_repr_html_"):
            data = {"text/html": _lines(value._repr_html_()), **data}
        found.append({"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"})
    for number in plt.get_fignums():
        drawn = io.BytesIO()
        plt.figure(number).savefig(
            drawn, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None}
        )
        image = base64.b64encode(drawn.getvalue()).decode() + "\n"
        data = {"image/png": image, "text/plain": ["<Figure>"]}
        found.append({"data": data, "metadata": {}, "output_type": "display_data"})
    plt.close("all")
    return found


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def store(path: Path) -> None:
    """Run a notebook twice in one folder and keep what the second run shows."""
    notebook = json.loads(path.read_text())
    with tempfile.TemporaryDirectory() as folder:
        once, again = (run(notebook, path.name, Path(folder)) for _ in range(2))
    if texts(notebook, once) != texts(notebook, again):
        raise SystemExit(f"{path.name} shows something else the second time; tag the cell: varies")
    for number, (cell, outputs) in enumerate(zip(code_cells(notebook), again, strict=True), 1):
        cell["execution_count"], cell["outputs"] = number, outputs
        for each in outputs:
            if "execution_count" in each:
                each["execution_count"] = number
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    print(f"{path.name}: {number} cells, {os.path.getsize(path) / 1e3:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks; all of them where none is named")
    for name in parser.parse_args().names or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        store(FOLDER / f"{name}.ipynb")


if __name__ == "__main__":
    main()
