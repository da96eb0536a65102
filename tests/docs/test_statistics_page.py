"""docs/how-to-statistics.md: its code and its commands run, and its numbers are those of the program."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from benchmarks.statistics import grid, models

from tests.command import fedsolve
from tests.network.security import tutorial

COX = "Surv(time, cens) ~ age + pnodes + C(horTh)"
PAGE = (Path(__file__).parents[2] / "docs" / "how-to-statistics.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = blocks("python")
    names: dict[str, Any] = {}
    exec(first, names)
    printed = {}
    for line in blocks("sh")[0].splitlines():
        words = shlex.split(line)[1:]
        result = fedsolve(*words)
        assert result.exit_code == 0, result.output
        printed[words[0]] = result.stdout
    assert blocks("text")[0] in printed["cox"]
    for file in ("describe.html", "logistic.md", "forest.svg", "curves.svg", "mixed.tex"):
        assert Path(file).stat().st_size > 100
    exec(second, names)
    assert blocks("text")[0] in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.network
def test_the_questions_over_a_network_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tables").mkdir()
    monkeypatch.chdir(tmp_path / "tables")
    exec(blocks("python")[0], {})
    keys, _, _ = tutorial.PAGE.read_text().partition("## 4. Data")
    given = f"{keys}\n```sh sites\ncp {tmp_path}/tables/$SITE.csv .\n```\n{PAGE}"
    said = tutorial.run(tmp_path, server="localhost", fresh=False, page=given)["server"].said()
    for words in (["glm", "cens ~ age + C(horTh)", "--family", "binomial"], ["cox", COX]):
        pooled = fedsolve(*words, "north.csv", "south.csv", "west.csv").stdout
        table = pooled.split("\n\n")[1]
        assert table in said, said[-3000:]


@pytest.mark.slow
def test_the_tables_are_those_of_the_commands() -> None:
    for line in (*models(), *grid()):
        assert line in PAGE.splitlines(), line
