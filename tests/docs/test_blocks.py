"""Blocks of Python and of commands: each is run by a test, in order, or marked as an illustration.

Indented lines and ```console show what can be typed; their commands and options exist, and no more is tested.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

import fedsolve as fs
from fedsolve.tables.encoder import encode
from tests.command import fedsolve
from tests.conftest import Dataset
from tests.docs.test_readme import make_tables

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^(<!-- illustration -->\n)?```python\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
EITHER = re.compile(
    r"^(<!-- illustration -->\n)?```(python|sh)[^\n]*\n(.*?)^```", flags=re.MULTILINE | re.DOTALL
)
ELSEWHERE = {
    "README": "docs/test_readme.py::test_the_commands_of_the_pages_run",
    "index": "docs/test_readme.py::test_the_commands_of_the_pages_run",
    "how-to-command-line": "docs/test_readme.py::test_the_commands_of_the_pages_run",
    "how-to-estimators": "estimators/test_estimators.py::test_the_how_to_runs",
    "how-to-gradient": "cli/test_gradient_options.py::test_the_blocks_of_the_how_to_run",
    "how-to-own-backbone": "data/test_backbones_torch.py::test_the_how_to_page",
    "how-to-own-dataset": "cli/test_features.py::test_the_how_to_page_works_as_written",
    "how-to-own-method": "closedform/test_own_method.py::test_the_methods_keep_the_laws_and_all_commands_run",
    "how-to-personal-models": "closedform/test_personal.py::test_the_code_of_the_how_to_runs",
    "how-to-statistics": "docs/test_statistics_page.py::test_the_page_runs",
    "tutorial": "docs/test_tutorial.py::test_every_command_of_the_tutorial_runs",
    "three-sites-one-model": "network/security/test_three_sites.py::test_the_page_works_as_written",
    "threat-model": "network/security/test_pages.py::test_sums_reveal_what_the_threat_model_says",
}
"""Pages whose code other tests run, with what the page needs and what comes out."""


def blocks(page: Path) -> list[tuple[bool, str, str]]:
    """Whether a block is an illustration, its language and its text."""
    return [(bool(mark), language, code) for mark, language, code in EITHER.findall(page.read_text())]


def pages() -> dict[str, Path]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {page.stem: page for page in found if blocks(page)}


def given(name: str, digits: Dataset) -> dict[str, Any]:
    """What a page takes for granted."""
    part = digits.head(300)
    X, y, X_test, y_test = part.features[:200], part.labels[:200], part.features[200:], part.labels[200:]
    federation = fs.LocalFederation.from_arrays(X, y, np.arange(len(y)) % 4)
    scope: dict[str, Any] = {"fs": fs, "X": X, "y": y, "X_test": X_test, "y_test": y_test, "rows": X_test}
    scope["federation"] = federation
    if name == "how-to-answers":
        make_tables(Path())
    if name == "how-to-private":
        scope["federation"] = fs.LocalFederation.from_arrays(X[:, 20:30], y > 4, np.arange(len(y)) % 4)
    if name == "how-to-export":
        write_hospital()
        scope["pipeline"] = pipeline()
    if name == "how-to-reproduce-a-table":
        assert fedsolve("experiment", "run", "small/deepafl-table-12-17").exit_code == 0
    if name == "which-method":
        chance = np.random.default_rng(0)
        age, sex = chance.normal(60, 10, 300), chance.choice(["f", "m"], 300)
        ill = age + 10 * (sex == "m") + chance.normal(0, 10, 300) > 65
        table = pandas.DataFrame({"age": age, "sex": sex})
        schema = fs.Schema(
            (fs.Column("age"), fs.Column("sex", "category", categories=("f", "m")), fs.Column("ill"))
        )
        table["ill"] = ill.astype(float)
        scope["two_classes"] = fs.LocalFederation.from_arrays(
            encode(schema, table), np.zeros(300), np.arange(300) % 3, task="regression", schema=schema
        )
        scope["deep_model"] = fs.DeepAFL(layers=1, width=64).fit(federation)
        old = y < 5
        scope["method"] = fs.AFL(ridge=1.0, intercept=True)
        scope["first"] = fs.LocalFederation.from_arrays(X[old], y[old], np.arange(old.sum()) % 2)
        scope["newcomers"] = fs.LocalFederation.from_arrays(X[~old], y[~old], np.arange((~old).sum()) % 2)
        scope["old_model"] = fs.Softmax().fit(scope["first"])
        scope["everybody"] = federation
    return scope


def write_hospital() -> None:
    chance = np.random.default_rng(0)
    lines = ["age,sex,ill"]
    for _ in range(300):
        age, sex = chance.normal(60, 10), chance.choice(["F", "M"])
        lines.append(f"{age:.1f},{sex},{'yes' if age + chance.normal(0, 5) > 60 else 'no'}")
    Path("ill.csv").write_text("\n".join(lines) + "\n")
    trained = fedsolve("train", "ill.csv", "--label", "ill", "--clients", 3, "--out", "model.safetensors")
    assert trained.exit_code == 0, trained.output
    written = fedsolve("export", "model.safetensors", "--onnx", "model.onnx")
    assert written.exit_code == 0, written.output


def pipeline() -> Any:
    from sklearn.compose import make_column_transformer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    table = pandas.read_csv("ill.csv")
    columns = make_column_transformer((StandardScaler(), ["age"]), (OneHotEncoder(), ["sex"]))
    return make_pipeline(columns, fs.AFLClassifier()).fit(table[["age", "sex"]], table["ill"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in pages() if name not in ELSEWHERE])
def test_the_code_of_a_page_runs(
    name: str, digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scope = given(name, digits)
    for illustration, language, code in blocks(pages()[name]):
        if illustration:
            continue
        if language == "python":
            exec(compile(code, f"{name}.md", "exec"), scope)
            continue
        for line in code.splitlines():
            program, *words = shlex.split(line, comments=True)
            assert program == "fedsolve"
            done = fedsolve(*words)
            assert done.exit_code == 0, f"{line}\n{done.output}"


def test_every_page_with_code_is_run_somewhere() -> None:
    for name, test in ELSEWHERE.items():
        path, _, function = test.partition("::")
        assert name in pages()
        assert f"def {function}(" in (ROOT / "tests" / path).read_text()
    marked = {name: sum(mark for mark, *_ in blocks(page)) for name, page in pages().items()}
    marked = {name: count for name, count in marked.items() if count}
    assert marked == {"performance": 2, "how-to-export": 1, "operations": 8}
    count = sum(len(blocks(page)) for page in pages().values())
    told = (ROOT / "CONTRIBUTING.md").read_text()
    assert f"{count} blocks, of which {sum(marked.values())} are marked" in " ".join(told.split())


def commands(page: Path) -> Iterator[str]:
    """Every `fedsolve ...` that stands in a block of a page, of whatever kind."""
    text = re.sub(r"\\\n\s*", " ", page.read_text())
    inside = False
    for line in text.splitlines():
        inside ^= line.startswith("```")
        if inside or line.startswith("    "):
            found = re.match(r"\s*(?:\$ )?fedsolve ([a-z].*)$", line)
            if found:
                yield found[1].partition(" #")[0]


@functools.cache
def helped(*words: str) -> str:
    for last in ("--help-all", "--help"):
        done = fedsolve(*words, last)
        if done.exit_code == 0:
            return str(done.output)
    raise AssertionError(f"there is no command fedsolve {' '.join(words)}")


@pytest.mark.slow
def test_every_command_on_every_page_exists_with_its_options() -> None:
    seen = 0
    own = "--pull --smoothing"  # of the methods that a page adds
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for line in commands(page):
            first, second, *_ = [*line.split(), ""]
            groups = ("keys", "files", "features", "experiment", "certificate")
            words = (first, second) if first in groups else (first,)
            method = re.search(r"--method (\w[\w-]*)(?=\s|$)", line)
            told = helped(*words)
            if method and first in ("train", "server", "exchange"):
                told += helped(*words, "--method", method[1])
            for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", line):
                assert option in told + own, f"{page.name}: fedsolve {line} ({option})"
            seen += 1
    assert seen > 100
