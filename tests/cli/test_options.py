"""Options are typed, described once, and say which of them a person wrote."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import click
import pytest
from click.testing import CliRunner

from fedsolve.cli.options import Options, command, option, required
from tests.command import fedsolve


class ToyOptions(Options):
    title = "Toys"
    names: tuple[str, ...] = required(argument=True, metavar="NAME...")
    number: int = option(3, "How many.", least=1)
    colour: Literal["red", "blue"] | None = option(None, "Which.", none="any")
    loud: bool = option(False, "Whether.")
    round: bool = option(True, "Shape.")
    tag: tuple[str, ...] = option((), "A tag.", metavar="TAG")


def taken(words: list[str], config: str | None, tmp_path) -> tuple[ToyOptions, click.testing.Result]:
    found: list[ToyOptions] = []

    @command("toy", config=True)
    def toy(options: ToyOptions) -> None:
        """A toy."""
        found.append(options)

    if config is not None:
        (tmp_path / "toy.toml").write_text(config)
        words = [*words, "--config", str(tmp_path / "toy.toml")]
    result = CliRunner().invoke(toy, words)
    return (found or [None])[0], result


def test_options_say_which_of_them_a_person_wrote(tmp_path):
    config = '[toy]\nnumber = 4\ntag = ["a", "b"]\ncolour = "red"\n'
    found, _ = taken(["x", "y", "--colour", "blue", "--no-round"], config, tmp_path)
    assert found == ToyOptions(
        names=("x", "y"), number=4, colour="blue", loud=False, round=False, tag=("a", "b")
    )
    assert found.written == {"names", "number", "tag", "colour", "round"}
    assert found.given("number", "loud", "round") == ["--number", "--round"]
    known = replace(found, number=9)
    assert (known.number, known.written, found.number) == (9, found.written, 4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["x", "--number", "0"], "number must be a whole number, at least 1; got 0"),
        (["x", "--number", "many"], "number must be a whole number, at least 1; got 'many'"),
        (["x", "--colour", "bleu"], "Did you mean 'blue'?"),
        ([], "Missing argument 'NAME...'"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(words, said, tmp_path):
    found, result = taken(words, None, tmp_path)
    assert found is None
    assert said in result.output


def test_a_parameter_of_deepafl_names_its_method_aloud(tmp_path):
    words = ("train", "digits", "--layers", "0", "--width", "8", "--clients", "2")
    result = fedsolve(*words)
    assert result.exit_code == 0
    assert "--layers is a parameter of deepafl, so that is trained" in result.stderr
    assert "--layers" not in fedsolve(*words, "--method", "deepafl").stderr
