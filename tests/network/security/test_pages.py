"""What the threat model and the operations page say, held against the program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedsolve import registry
from fedsolve.network import certificates, gate
from tests.command import fedsolve

pytestmark = pytest.mark.network

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ["three-sites-one-model.md", "operations.md", "threat-model.md", "how-to-files.md"]
COMMANDS = ("server", "client", "keys", "doctor", "evaluate", "files")


def page(name: str) -> str:
    return (DOCS / name).read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def test_sums_reveal_what_the_threat_model_says() -> None:
    (code,) = blocks(page("threat-model.md"), "python")
    exec(compile(code, "threat-model.md", "exec"), {})


def test_numbers_of_the_pages_are_those_of_the_program() -> None:
    threats, operations = page("threat-model.md"), page("operations.md")
    assert "five calls: about, hello, pull, answer and leave" in " ".join(threats.split())
    assert f"{gate.PER_SITE} connections" in threats
    assert f"lasts {certificates.SERVER_DAYS}" in " ".join(operations.split())
    assert f"warns {certificates.WARN_DAYS} days ahead" in operations


def test_tests_named_in_the_threat_model_exist() -> None:
    text = page("threat-model.md")
    here = "".join(path.read_text() for path in Path(__file__).parents[2].rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in here
    for path in re.findall(r"`(tests/\S+?\.py)", text):
        assert (DOCS.parent / path).exists()


@pytest.mark.parametrize("name", PAGES)
def test_options_on_the_pages_exist(name: str) -> None:
    """Every `fedsolve COMMAND --option` of a page is one that the command has."""
    found = re.findall(r"fedsolve ((?:keys |files )?[a-z]+)((?: [^`\n|#]*)?)", page(name))
    assert found
    for command, rest in found:
        if command.split()[0] not in COMMANDS:
            continue
        wanted = re.findall(r"--[a-z-]+", rest)
        if wanted:
            page_of = "--help-all" if command in ("server", "client", "files ask") else "--help"
            helped = fedsolve(*command.split(), page_of).stdout
            for word in wanted:
                assert re.search(rf"{word}\b", helped), f"{command} {word}"


def test_methods_that_gather_are_named_in_the_threat_model() -> None:
    text = page("threat-model.md").lower()
    gathering = [info.key for info in registry.methods() if info.gathers]
    assert "fedgen" in gathering
    assert [key for key in gathering if key not in text] == []
