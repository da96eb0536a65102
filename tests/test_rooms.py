"""Packages import in one direction only, and a name of a file or a class says one thing once."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedsolve

ROOT = Path(fedsolve.__file__).parent

SMALL = (
    "errors",
    "version",
    "arrays",
    "threads",
    "container",
    "parameters",
    "labels",
    "calibration",
    "registry",
)
"""Modules that every room may use; each of them only those before it."""

ROOMS: dict[str, tuple[str, ...]] = {
    "tables": (),
    "pages": (),
    "data": ("tables",),
    "backends": (),
    "model": ("tables", "pages"),
    "federation": ("model", "backends", "tables", "pages"),
    "scoring": ("model", "tables", "pages", "federation", "data", "backends"),
    "watching": (
        "model",
        "tables",
        "pages",
        "federation",
    ),
    "network": ("model", "scoring", "tables", "pages", "watching", "federation", "backends"),
    "cluster": ("model", "scoring", "tables", "pages", "federation", "data", "backends"),
    "privacy": (
        "model",
        "scoring",
        "tables",
        "pages",
        "federation",
    ),
    "closedform": ("model", "scoring", "tables", "pages", "federation", "backends"),
    "statistics": ("model", "tables", "pages", "federation", "closedform"),
    "gradient": ("model", "scoring", "tables", "pages", "federation", "data", "backends"),
    "extend": ("model", "scoring", "tables", "pages", "closedform", "gradient", "federation", "backends"),
    "testing": (
        "model",
        "scoring",
        "tables",
        "pages",
        "federation",
    ),
    "tracking": ("model", "scoring", "tables", "pages", "federation", "data"),
    "estimators": ("model", "scoring", "tables", "pages", "closedform", "gradient", "federation", "data"),
    "export": (
        "model",
        "scoring",
        "tables",
        "pages",
        "estimators",
        "closedform",
        "statistics",
        "gradient",
        "federation",
        "data",
        "backends",
    ),
    "experiments": (
        "model",
        "scoring",
        "tables",
        "pages",
        "closedform",
        "gradient",
        "cluster",
        "federation",
        "data",
        "backends",
    ),
    "cli": (
        "model",
        "scoring",
        "tables",
        "pages",
        "watching",
        "experiments",
        "export",
        "closedform",
        "statistics",
        "gradient",
        "network",
        "cluster",
        "privacy",
        "tracking",
        "federation",
        "data",
        "backends",
    ),
    "__main__": ("cli",),
    "__init__": (
        "model",
        "scoring",
        "tables",
        "pages",
        "watching",
        "estimators",
        "closedform",
        "statistics",
        "gradient",
        "network",
        "cluster",
        "privacy",
        "tracking",
        "federation",
        "data",
    ),
}
"""Which rooms a room may import from, besides itself and the small modules."""

ONLY_TYPES = {("model", "federation"), ("model", "export")}
"""Imports for annotations alone: a model is made by methods and names what they give it."""

DOORS = {
    ("tables/encoder.py", "write_text", "fedsolve.data.text_rows"),
    ("model.py", "to_onnx", "fedsolve.export"),
    ("federation/engine.py", "evaluate", "fedsolve.scoring.evaluation"),
    ("federation/recipe.py", "stages", "fedsolve.scoring.calibrating"),
    ("federation/recipe.py", "stages", "fedsolve.scoring.choice"),
}
"""Functions of lower modules that may enter a room above them, when they are called."""


def allowed(room: str) -> set[str]:
    if room in SMALL:
        return set(SMALL[: SMALL.index(room)])
    return {room, *ROOMS[room], *SMALL}


def imported(tree: ast.AST) -> Iterator[tuple[Any, str, bool]]:
    """Node, full name and whether for annotations only, of all that is imported anywhere in a module."""
    typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name their module in full"
            whole = node.module or ""
            names = [f"{whole}.{alias.name}" for alias in node.names] if whole == "fedsolve" else [whole]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [str(word.value) for word in node.args if isinstance(word, ast.Constant)]
        for name in names:
            yield node, name, id(node) in typing


def violations(root: Path) -> list[str]:
    """Every import of the package `root` that points upwards, and modules that have no place."""
    broken = []
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        room = place.parts[0] if len(place.parts) > 1 else place.stem
        if room not in ROOMS and room not in SMALL:
            broken.append(f"{place}: '{room}' has no place in the table of rooms")
            continue
        tree = ast.parse(path.read_text())
        entered = {
            (id(inner), name)
            for node in ast.walk(tree)
            for file, function, name in DOORS
            if isinstance(node, ast.FunctionDef) and (str(place), node.name) == (file, function)
            for inner in ast.walk(node)
        }
        for node, name, types in imported(tree):
            line = node.lineno
            if (id(node), name) in entered:
                continue
            package, _, rest = name.partition(".")
            target = rest.partition(".")[0] or "__init__"
            if package != "fedsolve" or target in allowed(room) or (types and (room, target) in ONLY_TYPES):
                continue
            broken.append(f"{place}:{line}: {room} imports {target} ({name})")
    return broken


def repeated(root: Path) -> list[str]:
    """Names that two modules share, or two classes."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        where = str(path.relative_to(root))
        if path.name != "__init__.py":
            places[path.name].append(where)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[f"class {node.name}"].append(f"{where}:{node.lineno}")
    return [f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1]


def test_imports_point_downwards_only() -> None:
    assert violations(ROOT) == []


def test_names_of_files_and_classes_say_one_thing_once() -> None:
    assert repeated(ROOT) == []


def test_every_room_of_the_table_is_there() -> None:
    assert all((ROOT / room).is_dir() or (ROOT / f"{room}.py").is_file() for room in (*ROOMS, *SMALL))


def test_the_table_has_no_circles() -> None:
    for room in ROOMS:
        above = {other for other, below in ROOMS.items() if room in below}
        reached = {room}
        while more := {name for each in reached for name in ROOMS[each]} - reached:
            reached |= more
        assert not above & reached


PLANTED = {
    "at the top": ("data/tables.py", "from fedsolve.federation.messages import Term"),
    "inside a function": ("federation/local.py", "def f():\n    from fedsolve.closedform import afl"),
    "for annotations": ("network/x.py", "if TYPE_CHECKING:\n    from fedsolve.gradient import FedAvg"),
    "by its package": ("network/x.py", "from fedsolve import data"),
    "the whole package": ("network/x.py", "import fedsolve"),
    "under another name": ("closedform/afl.py", "import fedsolve.gradient.run as run"),
    "by a string": ("federation/x.py", "importlib.import_module('fedsolve.data.images')"),
    "a small module": ("labels.py", "from fedsolve.model import Model"),
    "more than annotations": ("model.py", "from fedsolve.federation.method import Method"),
    "beside the door": ("model.py", "def save():\n    from fedsolve.export import write_onnx"),
    "the door elsewhere": ("labels.py", "def to_onnx():\n    from fedsolve.export import write_onnx"),
    "a module without a place": ("novelty.py", ""),
}


@pytest.mark.parametrize(("file", "source"), PLANTED.values(), ids=PLANTED)
def test_an_import_that_points_upwards_is_seen(file: str, source: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    (broken,) = violations(tmp_path)
    assert broken.startswith(file)


def test_imports_that_point_downwards_are_none(tmp_path: Path) -> None:
    (tmp_path / "gradient").mkdir()
    below = (
        "from fedsolve.federation import method\nfrom fedsolve import container\nimport fedsolve.gradient.run"
    )
    (tmp_path / "gradient" / "x.py").write_text(f"{below}\nimport numpy")
    types = "if TYPE_CHECKING:\n    from fedsolve.federation.method import Method"
    (tmp_path / "model.py").write_text(types)
    assert violations(tmp_path) == []


def test_a_name_given_twice_is_seen(tmp_path: Path) -> None:
    for room, source in (("data", "class Rows: ..."), ("cli", "def f():\n    class Rows: ...")):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").touch()
        (tmp_path / room / "same.py").write_text(source)
    assert [line.partition(":")[0] for line in repeated(tmp_path)] == ["same.py", "class Rows"]
