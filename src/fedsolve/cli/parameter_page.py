"""The reference page of all parameters, in Markdown and as JSON can hold it."""

from __future__ import annotations

from dataclasses import MISSING
from typing import Any

from fedsolve.cli.method_options import all_groups
from fedsolve.parameters import Description

_HEAD = """# Parameters

Every parameter of every method: in Python under its name, on the command line as its option, in TOML files
under its name. A gradient method has all that stands under "Training by gradient" and "Feedback alignment";
its own table adds to that, and shows the defaults and meanings that differ. None is written `none` outside
Python. This page is what `fedsolve methods --parameters` prints.
"""
_COLUMNS = """| parameter | option | value | default | what it is |
|---|---|---|---|---|"""


def parameter_page() -> str:
    """The page, one table for each group of parameters."""
    tables = (
        "\n".join([f"## {title}\n", _COLUMNS, *map(_row, descriptions), ""])
        for title, descriptions in all_groups().items()
    )
    return "\n".join([_HEAD, *tables]).rstrip()


def parameter_lists() -> dict[str, list[dict[str, Any]]]:
    """The same for a program."""
    return {
        title: [
            {
                "name": each.name,
                "option": each.option,
                "value": each.rule,
                "default": None if each.default is MISSING else each.default,
                "help": each.help,
            }
            for each in descriptions
        ]
        for title, descriptions in all_groups().items()
    }


def _row(description: Description) -> str:
    option = description.option.replace("/", "`, `")
    also = f", `{description.also}`" if description.also else ""
    rule = description.rule.replace("None", "none").replace("|", r"\|")
    meaning = description.help.replace("|", r"\|")
    return f"| `{description.name}` | `{option}`{also} | {rule} | {description.default_text} | {meaning} |"
