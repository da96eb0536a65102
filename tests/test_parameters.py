"""One description of a parameter drives checks, command line, TOML files, help and the reference page."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from click.testing import CliRunner

import fedsolve as fs
from fedsolve import registry
from fedsolve.cli.main import main
from fedsolve.cli.method_options import is_gradient, method_keys
from fedsolve.closedform.afl import AFL
from fedsolve.errors import DataError, did_you_mean
from fedsolve.experiments.reading import read_experiment
from fedsolve.parameters import build, described, parameter
from tests.command import document, fedsolve, refused

DOCS = Path(__file__).parent.parent / "docs"


@dataclass(frozen=True)
class Toy(AFL):
    """AFL with parameters of every kind; `plain` is described by nothing but its type."""

    key: ClassVar[str] = "toy"

    share: float = parameter(0.5, "Share of the toys.", above=0, most=1)
    toys: int = parameter(3, "How many toys.", least=1)
    height: float | Literal["auto"] = parameter(2.0, "Height of a toy.", least=0, below=9)
    colour: Literal["red", "blue"] | None = parameter("red", "Colour of a toy.")
    loud: bool = parameter(False, "Whether it makes noise.", flag="--loud/--quietly")
    named: str | None = parameter(None, "Its name.", metavar="NAME", none="nameless")
    plain: int = 7


@dataclass(frozen=True)
class OtherToy(Toy):
    key: ClassVar[str] = "othertoy"

    toys: int = 5
    share: float = parameter(0.25, "Share of other toys.")
    height: float | Literal["auto"] = parameter(3.0, above=1)


NO_OTHERS = ("fedavg", "fednova", "fedper")
"""Methods with the parameters that all gradient methods have, and no others."""


def helped(*words: Any) -> str:
    """A help page as a terminal of 100 columns shows it."""
    page = CliRunner().invoke(main, [str(word) for word in words], terminal_width=100)
    assert page.exit_code == 0, page.output
    return page.stdout


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> type[Toy]:
    """A method of another package, known by its entry point."""
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    monkeypatch.setattr(registry, "_entry_points", lambda: {"toy": registry.address_of(Toy)})
    registry.register("toy", title="Toy", paper="Nobody, 2026")(Toy)
    return Toy


# -- one description drives all --------------------------------------------------------------------


def test_a_parameter_of_a_new_method_is_an_option_with_help(toy: type[Toy]) -> None:
    page = " ".join(helped("train", "--method", "toy", "--help").split())
    assert "Parameters of toy (Nobody, 2026):" in page
    assert "--share FLOAT Share of the toys, in (0, 1]. [default: 0.5]" in page
    assert "--height FLOAT|auto Height of a toy, in [0, 9). [default: 2]" in page
    assert "--colour [red|blue|none] Colour of a toy. [default: red]" in page
    assert "--loud / --quietly Whether it makes noise. [default: quietly]" in page
    assert "--named NAME Its name. [default: nameless]" in page
    assert "--plain INTEGER [default: 7]" in page
    assert "--residual-ridge" not in page


def test_options_reach_the_method(toy: type[Toy]) -> None:
    words = ("train", "digits", "--clients", 3, "--method", "toy")
    given = ("--share", "1", "--toys", "4", "--height", "auto", "--colour", "none", "--loud", "--plain", "-2")
    parameters = document(*words, *given)["parameters"]
    assert parameters == toy(share=1.0, toys=4, height="auto", colour=None, loud=True, plain=-2).parameters()
    assert document(*words)["parameters"] == toy().parameters()
    refused(fedsolve(*words, "--share", "0"), 2, "share must be a number in (0, 1]; got 0.0")
    refused(fedsolve(*words, "--toys", "1.5"), 2, "toys must be a whole number, at least 1; got '1.5'")
    refused(fedsolve(*words, "--colour", "bleu"), 2, "colour must be 'red' or 'blue'", "mean 'blue'?")
    refused(fedsolve("train", "digits", "--toys", "4"), 2, "--toys belongs to toy, not to auto")


def test_a_file_takes_the_same_parameters(toy: type[Toy], tmp_path: Path) -> None:
    def cells(parameters: str) -> Any:
        path = tmp_path / "toy.toml"
        path.write_text(
            'title = "t"\nseeds = [0]\n[dataset]\naddress = "digits"\n[partition]\nkind = "iid"\n'
            f'clients = 2\n[method]\nmethod = "toy"\nparameters = {{{parameters}}}\n'
        )
        return read_experiment(path).cells()

    (cell,) = cells('share = 1, colour = "none", height = "auto", loud = true')
    assert cell.parameters == toy(share=1.0, colour=None, height="auto", loud=True).parameters()
    assert isinstance(cell.parameters["share"], float), "1 and 1.0 describe the same cell"
    for wrong, told in {
        "share = 2": r"share must be a number in \(0, 1\]; got 2.0",
        "toys = 1.0": "toys must be a whole number, at least 1; got 1.0",
        'loud = "yes"': "loud must be true or false; got 'yes'",
        "shaer = 1": "unknown parameter 'shaer'.*Did you mean 'share'?",
    }.items():
        with pytest.raises(DataError, match=told):
            cells(wrong)


def test_the_reference_page_is_what_the_command_prints() -> None:
    printed = fedsolve("methods", "--parameters").stdout
    assert (DOCS / "reference-parameters.md").read_text() == printed
    for key in method_keys():
        assert f"## Parameters of {key} " in printed or key in NO_OTHERS


def test_the_reference_page_shows_a_new_method(toy: type[Toy]) -> None:
    page = fedsolve("methods", "--parameters").stdout
    assert "| `share` | `--share` | a number in (0, 1] | 0.5 | Share of the toys. |" in page
    lists = document("methods", "--parameters")["parameters"]
    assert lists["Parameters of toy (Nobody, 2026)"][4]["name"] == "share"


def test_the_command_refuses_a_parameter_that_hides_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    hiding = dataclasses.make_dataclass("Hiding", [("clients", int, 3)], bases=(AFL,), frozen=True)
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    registry.register("hiding")(hiding)
    refused(fedsolve("train", "digits", "--method", hiding.key), 2, "the option --clients", "flag='--OTHER'")


def test_a_type_that_no_word_spells_is_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = dataclasses.make_dataclass(
        "Widths", [("widths", tuple[int, ...], (1, 2))], bases=(AFL,), frozen=True
    )
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    registry.register("widths")(widths)
    assert build(widths, {"widths": (3,)}) == widths(widths=(3,))
    assert "--widths" not in helped("train", "--method", widths.key, "--help")
    assert document("train", "digits", "--method", widths.key)["parameters"]["ridge"] == 0.0


@pytest.mark.parametrize("key", method_keys())
def test_every_parameter_has_words_of_help(key: str) -> None:
    for name, description in described(registry.method_class(key)).items():
        assert len(description.help) > 10, name
        assert description.help.endswith("."), name


# -- checks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("share", [1e-9, 1, 1.0], [0, 0.0, -1.0, 1.0 + 1e-9, float("nan"), float("inf"), True, "1", None]),
        ("toys", [1, 10**9], [0, -1, 1.0, True, "1", None]),
        ("height", [0, 0.0, 8.999, "auto"], [-1e-9, 9, 9.0, "Auto", "none", None, False]),
        ("colour", ["red", "blue", None], ["green", "none", 1]),
        ("loud", [True, False], [0, 1, "true", None]),
        ("named", ["x", "", None], [1, True]),
        ("plain", [-(10**9), 0], [0.5, "0", None]),
    ],
)
def test_values_at_the_edges(name: str, inside: list[Any], outside: list[Any]) -> None:
    for value in inside:
        assert getattr(Toy(**{name: value}), name) == value
    for value in outside:
        with pytest.raises(DataError, match=rf"^{name} must be .*; got "):
            Toy(**{name: value})


def test_numpy_scalars_are_numbers() -> None:
    import numpy as np

    made = Toy(share=np.float32(0.5), toys=np.int64(2), loud=np.bool_(True))  # type: ignore[arg-type]
    assert made.parameters()["toys"] == 2


def test_a_subclass_inherits_what_it_does_not_state() -> None:
    base, other = described(Toy), described(OtherToy)
    assert list(base) == list(other)
    assert (other["toys"].default, other["toys"].help) == (5, "How many toys.")
    assert (other["share"].help, other["share"].most) == ("Share of other toys.", base["share"].most)
    assert other["height"].help == base["height"].help
    with pytest.raises(DataError, match=r"height must be 'auto' or a number in \(1, 9\); got 1"):
        OtherToy(height=1.0)
    with pytest.raises(DataError, match="toys must be a whole number, at least 1; got 0"):
        OtherToy(toys=0)
    assert other["toys"].owner is Toy


def test_build_needs_what_has_no_default() -> None:
    bare = dataclasses.make_dataclass("Bare", [("size", int)], frozen=True)
    assert build(bare, {"size": 3}) == bare(3)
    with pytest.raises(DataError, match="'size' has no default"):
        build(bare, {})
    with pytest.raises(DataError, match="size must be a whole number; got 'big'"):
        build(bare, {"size": "big"})


# -- help pages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["train", "server"])
def test_help_fits_on_a_screen_and_a_half(command: str) -> None:
    page = helped(command, "--help").splitlines()
    assert len(page) <= 65
    assert max(map(len, page)) <= 100
    text = "\n".join(page)
    for description in described(fs.Auto).values():
        assert f"  {description.option.partition('/')[0]} " in text
    deep = helped(command, "--method", "deepafl", "--help")
    for description in described(fs.DeepAFL).values():
        assert f"  {description.option.partition('/')[0]} " in deep
    assert len(deep.splitlines()) <= 72
    for absent in ("--rounds", "--balance", "--debug"):
        assert absent not in text


@pytest.mark.parametrize("command", ["train", "server"])
def test_help_all_shows_the_parameters_of_every_method(command: str) -> None:
    page = helped(command, "--help-all")
    for key in method_keys():
        for description in described(registry.method_class(key)).values():
            assert f"{description.option.split('/')[0]} " in page
        assert f"\nParameters of {key} (" in page or key in NO_OTHERS
    places = [
        page.index(f"\n{title}:\n") for title in ("Training by gradient", "Feedback alignment", "Output")
    ]
    assert places == sorted(places)
    assert "--debug" in page
    assert "[default: local] [default: local]" not in " ".join(page.split())
    assert "cuda, cuda:1, or auto" in " ".join(page.split())
    assert len(page) > 2 * len(helped(command, "--help"))


@pytest.mark.parametrize("key", ["afl", "apfl", "cascade", "fedprox", "fedpcl"])
def test_the_help_page_of_a_method_has_its_parameters_and_no_others(key: str) -> None:
    page = helped("train", "--method", key, "--help")
    flat = " ".join(page.split())
    own = described(registry.method_class(key))
    for description in own.values():
        assert f" {description.option.split('/')[0]} " in flat
        assert f"[default: {description.default_text}]" in flat
    for other in method_keys():
        for name in set(described(registry.method_class(other))) - set(own):
            assert f"\n  --{name.replace('_', '-')} " not in page
    assert ("Training by gradient:" in page) == is_gradient(key)


def test_the_method_of_a_file_decides_which_options_there_are(tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    path.write_text('[server]\nmethod = "afl"\nridge = 0.5\n')
    page = helped("server", "--config", path, "--help")
    assert "Parameters of afl" in page
    path.write_text('[server]\nmethod = "afl"\nlayers = 3\nclients = 1\n')
    refused(fedsolve("server", "--config", path), 2, "unknown entry 'layers'")


# -- did you mean ----------------------------------------------------------------------------------


def test_near_words_are_offered_whatever_their_capitals() -> None:
    assert did_you_mean("FedProxx", ["fedavg", "fedprox"]) == " Did you mean 'fedprox'?"
    assert did_you_mean("zzz", ["fedavg", "fedprox"]) == ""


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("--method", "fedprx"), "unknown method 'fedprx'. Did you mean 'fedprox'?"),
        (("--partition", "dirichlt"), "Did you mean 'dirichlet'?"),
        (("--layrs", "3"), "No such option: --layrs. Did you mean '--layers'?"),
        (("--proxmal", "3"), "No such option: --proxmal. Did you mean '--proximal'?"),
        (("--activation", "gleu"), "got 'gleu'. Did you mean 'gelu'?"),
        (("--data", "folder"), "Did you mean '--data-root'?"),
    ],
)
def test_mistyped_words_of_a_command_line(words: tuple[str, ...], meant: str) -> None:
    refused(fedsolve("train", "digits", *words), 2, meant)


def test_mistyped_columns(tmp_path: Path) -> None:
    rows = tmp_path / "patients.csv"
    rows.write_text("age,ward,diagnosis\n1,n,0\n2,s,1\n3,n,0\n4,s,1\n")
    for words in (("--label", "diagnosos"), ("--drop", "Diagnosi"), ("--client-column", "diagnosys")):
        refused(fedsolve("train", rows, *words), 2, f"'{words[1]}'. Did you mean 'diagnosis'?")


def test_mistyped_names_in_python() -> None:
    with pytest.raises(DataError, match=r"unknown method 'deepfl'. Did you mean 'deepafl'\?"):
        registry.method_class("deepfl")
    with pytest.raises(DataError, match=r"unknown parameter 'rigde'. Did you mean 'ridge'\?"):
        build(AFL, {"rigde": 1})
    with pytest.raises(DataError, match=r"Did you mean 'float32'\?"):
        fs.DeepAFL(precision="flaot32")  # type: ignore[arg-type]


def test_the_client_has_two_help_pages() -> None:
    short, whole = helped("client", "--help"), helped("client", "--help-all")
    assert "--delimiter" not in short
    assert "--dry-run" in short
    for word in ("--delimiter", "--debug", "--features-key"):
        assert f"  {word} " in whole
