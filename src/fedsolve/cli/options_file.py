"""Options from a TOML file: one table for each command, under the names of its options; flags win."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import click

from fedsolve.cli.command import F, option
from fedsolve.errors import DataError, did_you_mean

_GROUP = "Configuration"


def config_option(command: F) -> F:
    """Decorator: --config FILE, whose table named like the command gives what flags do not."""
    return option(
        "--config",
        metavar="FILE",
        group=_GROUP,
        is_eager=True,
        expose_value=False,
        callback=_read,
        help="TOML file with a table of this command's options, such as [server] or [client].",
    )(command)


def config_table(path: str, command: str) -> dict[str, Any]:
    """The table of a command in a TOML file."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise DataError(f"cannot read {path}: {problem.strerror or problem}.") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise DataError(f"{path} is not TOML: {problem}.") from problem
    table = document.get(command, {})
    if not isinstance(table, dict) or not table:
        tables = ", ".join(f"[{key}]" for key in document) or "nothing"
        raise DataError(f"{path} has no table [{command}]; it has {tables}.")
    return table


def _read(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    if path is None:
        return
    name = ctx.command.name or ""
    options = [other for other in ctx.command.get_params(ctx) if isinstance(other, click.Option)]
    known = {spelling.removeprefix("--"): other for other in options for spelling in other.opts}
    values: dict[str, Any] = {}
    for key, value in config_table(path, name).items():
        chosen = known.get(key.replace("_", "-"))
        if chosen is None or chosen is param or chosen.name is None:
            raise DataError(f"{path}: [{name}] has the unknown entry '{key}'.{did_you_mean(key, known)}")
        if isinstance(value, list) and not chosen.multiple:
            value = ",".join(map(str, value))
        values[chosen.name] = value
    ctx.default_map = {**(ctx.default_map or {}), **values}
