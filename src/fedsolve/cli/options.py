"""Options that several commands share: how to read a data file, how to print."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedsolve.cli.command import LAST, Choice, F, option, options
from fedsolve.data.tables import ColumnLayout
from fedsolve.log_lines import STYLES

READING = "Reading the data"


def data_options(command: F) -> F:
    """Decorator: how to read a data file; `layout_from` takes the values."""
    return options(
        option(
            "--features-key",
            more=True,
            metavar="KEY",
            group=READING,
            help="npz: array of features.  [default: x_train or x_test, else x, X, features or data]",
        ),
        option(
            "--labels-key",
            more=True,
            metavar="KEY",
            group=READING,
            help="npz: array of labels.  [default: y_train or y_test, else y, Y, labels, label or target]",
        ),
        option(
            "--label",
            metavar="NAME|INDEX",
            group=READING,
            help="Label column.  [default: label, target, class, y, or the last]",
        ),
        option(
            "--drop",
            more=True,
            metavar="NAME|INDEX",
            multiple=True,
            show_default=False,
            group=READING,
            help="csv, parquet: column to leave out, such as a row number. May be repeated.",
        ),
        option(
            "--delimiter",
            more=True,
            default=",",
            metavar="CHAR",
            group=READING,
            help="csv: what separates cells; 'tab', or 'auto' to guess.",
        ),
        option(
            "--header/--no-header",
            default=True,
            more=True,
            group=READING,
            help="csv: whether line 1 has names.",
        ),
        spelling_options,
    )(command)


def spelling_options(command: F) -> F:
    """Decorator: how the cells of a csv file are spelled."""
    return options(
        option(
            "--decimal", more=True, default=".", metavar="SIGN", group=READING, help="csv: before fractions."
        ),
        option(
            "--thousands",
            more=True,
            default="",
            show_default=False,
            metavar="SIGN",
            group=READING,
            help="csv: between groups of three digits.  [default: none]",
        ),
        option(
            "--encoding", more=True, default="utf-8", metavar="NAME", group=READING, help="csv: of its text."
        ),
    )(command)


def layout_from(given: dict[str, Any]) -> ColumnLayout:
    """The layout that `data_options` (and --client-column, where there is one) describe."""
    return ColumnLayout(
        features_key=given["features_key"],
        labels_key=given["labels_key"],
        label=given["label"],
        client=given.get("client"),
        drop=given["drop"],
        delimiter=given["delimiter"],
        header=given["header"],
        decimal=given["decimal"],
        thousands=given["thousands"],
        encoding=given["encoding"],
    )


def output_options(command: F) -> F:
    """Decorator: --json and --quiet."""
    return options(
        option(
            "--json",
            "as_json",
            is_flag=True,
            group=LAST,
            help='Print one JSON document on stdout; of an error {"error": {...}}.',
        ),
        option(
            "--quiet",
            "-q",
            is_flag=True,
            more=True,
            group=LAST,
            help="Print nothing but errors and warnings.",
        ),
    )(command)


log_option = option(
    "--log",
    more=True,
    type=Choice(STYLES),
    default="text",
    group=LAST,
    help="How lines on stderr and in log files are written; json: an object each, for programs.",
)


def allow_options(group: str) -> Callable[[F], F]:
    """Decorator: --allow-network and --allow-method, the code that somebody else may name to have it run."""
    return options(
        option(
            "--allow-network",
            "networks",
            metavar="P.M:F",
            multiple=True,
            show_default=False,
            group=group,
            help="Function package.module:function that may be imported and called to make a network of that "
            "name. May be repeated.  [default: none]",
        ),
        option(
            "--allow-method",
            "methods",
            metavar="P.M:C",
            multiple=True,
            show_default=False,
            group=group,
            help="Method from outside fedsolve, as package.module:Class or by the name of its entry point, "
            "that may be imported and run. May be repeated.  [default: none]",
        ),
    )
