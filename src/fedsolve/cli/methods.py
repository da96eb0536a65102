"""`fedsolve methods`: what each method needs and what leaves a client."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import MISSING
from typing import Any, Literal

from rich.console import Console

from fedsolve import registry
from fedsolve.cli.method_options import all_groups, is_gradient, method_keys
from fedsolve.cli.options import Options, command, option
from fedsolve.cli.output import Output, fact_grid
from fedsolve.errors import DataError
from fedsolve.experiments.algorithms import EXTRA, lacking
from fedsolve.parameters import Description

_HEAD = """# Parameters

Every parameter of every method: in Python under its name, on the command line as its option, in TOML files
under its name. A gradient method has all that stands under "Training by gradient" and "Feedback alignment";
its own table adds to that, and shows the defaults and meanings that differ. None is written `none` outside
Python. This page is what `fedsolve methods --parameters` prints.
"""
_COLUMNS = """| parameter | option | value | default | what it is |
|---|---|---|---|---|"""


class ListOptions(Options):
    title = "Methods"
    family: Literal["closed-form", "gradient"] | None = option(None, "Only the methods of this family.")
    parameters: bool = option(False, "The parameters of every method, as a Markdown page.")


@command()
def methods(options: ListOptions, output: Output) -> None:
    """List the methods: paper, exchanges, what travels up and down, sums or gathers.

    "Sums" means the server needs only the total of all clients' answers, so secure aggregation applies;
    "gathers" means it needs each client's answer by itself. The parameters of a method, with their
    defaults: fedsolve train --method NAME --help.

    # the methods, their papers and their traffic
    fedsolve methods
    # those that train by gradient
    fedsolve methods --family gradient
    # all parameters, as a page in Markdown
    fedsolve methods --parameters > parameters.md
    # the same for a program
    fedsolve methods --json
    """
    family = options.family
    if options.parameters:
        output.result(
            {"parameters": parameter_lists()}, lambda page: page.out(parameter_page(), highlight=False)
        )
        return
    known = [told for told in map(described, method_keys()) if family in (None, told["family"])]

    def show(page: Console) -> None:
        for told in known:
            page.print(f"[bold]{told['key']}[/bold]  {told['title']}")
            page.print(fact_grid(_lines(told)))
            page.print()
        if family != "gradient":
            page.print("T layers, d features per layer, C classes.", style="dim")
        if family != "closed-form":
            page.print("Weights are those of the network that is trained.", style="dim")

    output.result({"methods": known}, show)


def described(key: str) -> dict[str, Any]:
    """What a user wants to know of a method before choosing it, as JSON can hold it."""
    method: Any = registry.method_class(key)
    gradient, takes_feedback = is_gradient(key), False
    if gradient:  # by the method's own checks
        with suppress(DataError):
            method(network="mlp", feedback="lowest")
            takes_feedback = True
    return registry.info(key).as_dict() | {
        "family": "gradient" if gradient else "closed-form",
        "feedback_alignment": takes_feedback,
        "keeps_state": gradient and method.keeps_state,
        "needs": [EXTRA] if gradient else [],
        "available": lacking(key) is None,
    }


def _lines(told: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [
        ("  paper", told["paper"]),
        ("  exchanges", told["exchanges"]),
        ("  a client sends", told["up"]),
        ("  a client is sent", told["down"]),
        ("  the server sees", "every answer (gathers)" if told["gathers"] else "only sums"),
    ]
    if told["family"] == "gradient":
        method: Any = registry.method_class(told["key"])
        once = method.rounds == 1
        named = "yes, in layers that are named: a choice would need an earlier round" if once else "yes"
        extra = "" if told["available"] else f", not installed: pip install '{EXTRA}'"
        lines += [
            ("  a client keeps", "its own state between rounds" if told["keeps_state"] else "nothing"),
            ("  feedback alignment", named if told["feedback_alignment"] else "no"),
            ("  needs", f"{EXTRA}{extra}"),
        ]
    return lines


def parameter_page() -> str:
    """The page, one table for each group of parameters."""
    lines = [_HEAD]
    for title, descriptions in all_groups().items():
        lines += [f"## {title}\n", _COLUMNS, *map(_row, descriptions), ""]
    return "\n".join(lines).rstrip()


def parameter_lists() -> dict[str, list[dict[str, Any]]]:
    def told(one: Description) -> dict[str, Any]:
        default = None if one.default is MISSING else one.default
        return {
            "name": one.name,
            "option": one.option,
            "value": one.rule,
            "default": default,
            "help": one.help,
        }

    return {title: [*map(told, descriptions)] for title, descriptions in all_groups().items()}


def _row(description: Description) -> str:
    option = description.option.replace("/", "`, `")
    also = f", `{description.also}`" if description.also else ""
    rule = description.rule.replace("None", "none").replace("|", r"\|")
    meaning = description.help.replace("|", r"\|")
    return f"| `{description.name}` | `{option}`{also} | {rule} | {description.default_text} | {meaning} |"
