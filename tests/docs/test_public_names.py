"""The pages and notebooks import public names only; docs/compatibility.md says which those are."""

from __future__ import annotations

import ast
import inspect
import json
import pydoc
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import fedsolve as fs
from tests.docs.test_blocks import BLOCK

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compatibility.md").read_text().partition("\n## Python\n")[2]
MODULES = set(re.findall(r"`(fedsolve(?:\.\w+)?)`", PAGE.partition("\n|")[0]))
NAMES = {
    module: set(re.findall(r"`(\w+)`", names))
    for module, names in re.findall(r"^\| `(fedsolve[\w.]+)` \| (.+) \|$", PAGE, flags=re.MULTILINE)
}


def code() -> Iterator[tuple[str, str]]:
    """Every block of Python on the pages, and every cell of the notebooks."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        yield from ((page.name, text) for _, text in BLOCK.findall(page.read_text()))
    for path in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code":
                yield path.name, "".join(cell["source"])


def imported(text: str) -> Iterator[tuple[str, str]]:
    """Modules of fedsolve that a text imports from, and the names that it takes."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedsolve":
            yield from ((str(node.module), each.name) for each in node.names)
        elif isinstance(node, ast.Import):
            yield from ((each.name, "") for each in node.names if each.name.startswith("fedsolve."))


def private(text: str) -> list[str]:
    return [
        f"{module}.{name}"
        for module, name in imported(text)
        if module not in MODULES and name not in NAMES.get(module, ())
    ]


def test_pages_and_notebooks_import_public_names_only() -> None:
    assert {"fedsolve", "fedsolve.gradient", "fedsolve.extend", "fedsolve.testing"} <= MODULES
    assert sum(len(list(imported(text))) for _, text in code()) > 40
    assert [(name, found) for name, text in code() for found in private(text)] == []
    assert private("from fedsolve.federation.running_sum import RunningSum") == [
        "fedsolve.federation.running_sum.RunningSum"
    ]


@pytest.mark.torch
def test_the_public_names_are_there() -> None:
    pytest.importorskip("torch")
    for module in sorted(MODULES):
        import_module(module)
    for module, names in NAMES.items():
        assert names
        assert all(hasattr(import_module(module), name) for name in names), module


def test_help_says_what_a_method_is() -> None:
    told = pydoc.render_doc(fs.AFL, renderer=pydoc.plaintext)
    assert "a linear classifier in one exchange" in told
    assert "W = (sum XᵀX + ridge I)^-1 sum XᵀY" in told
    for name in fs.__all__:
        thing = getattr(fs, name)
        if inspect.isclass(thing):
            assert inspect.getdoc(thing) != inspect.getdoc(thing.__mro__[1]), f"{name} has no docstring"
