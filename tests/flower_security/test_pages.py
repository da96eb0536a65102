"""What the threat model and the operations page say, held against the program."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from fedsolve import registry
from fedsolve.network import certificates, gate, sessions
from tests.command import fedsolve

pytestmark = pytest.mark.flower

DOCS = Path(__file__).parents[2] / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def test_sums_reveal_what_the_threat_model_says() -> None:
    (code,) = blocks(page("threat-model.md"), "python")
    exec(compile(code, "threat-model.md", "exec"), {})


def test_numbers_of_the_pages_are_those_of_the_program() -> None:
    threats, operations = page("threat-model.md"), page("operations.md")
    assert len(gate.CALLS) == 5
    assert "five calls: greeting, hello, pull, answer and leave" in " ".join(threats.split())
    assert f"good once, for {sessions.CHALLENGE_SECONDS} s" in " ".join(threats.split())
    assert f"lasts {certificates.SERVER_DAYS}" in " ".join(operations.split())
    assert f"warns {certificates.WARN_DAYS} days ahead" in operations


def test_tests_named_in_the_threat_model_exist() -> None:
    text = page("threat-model.md")
    here = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in here
    for path in re.findall(r"`(tests/\S+?\.py)", text):
        assert (DOCS.parent / path).exists()


def test_settings_of_the_operations_page_are_options(tmp_path: Path) -> None:
    (text,) = blocks(page("operations.md"), "toml")
    helped = fedsolve("client", "--help").stdout
    for name in tomllib.loads(text)["client"]:
        assert f"--{name} " in helped
    (unit,) = blocks(page("operations.md"), "ini")
    assert "fedsolve client --config" in unit


@pytest.mark.parametrize("name", ["three-sites-one-model.md", "operations.md", "threat-model.md"])
def test_options_on_the_pages_exist(name: str) -> None:
    """Every `fedsolve COMMAND --option` of a page is one that the command has."""
    found = re.findall(r"fedsolve ((?:keys )?[a-z]+)((?: [^`\n|#]*)?)", page(name))
    assert found
    for command, rest in found:
        if command.split()[0] not in ("server", "client", "keys", "doctor", "evaluate"):
            continue
        wanted = re.findall(r"--[a-z-]+", rest)
        if wanted:
            page_of = "--help-all" if command == "server" else "--help"
            helped = fedsolve(*command.split(), page_of).stdout
            for word in wanted:
                assert re.search(rf"{word}\b", helped), f"{command} {word}"


def test_methods_that_gather_are_named_in_the_threat_model() -> None:
    text = page("threat-model.md").lower()
    gathering = [info.key for info in registry.methods() if info.gathers]
    assert "fedgen" in gathering
    assert [key for key in gathering if key not in text] == []
