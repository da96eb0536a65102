"""Options from a TOML file: one table for each command, under the names of its options; flags win."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

import click

from fedsolve.cli.command import F, option
from fedsolve.errors import DataError

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


def _read(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    if path is None:
        return
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise DataError(f"cannot read {path}: {problem.strerror or problem}.") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise DataError(f"{path} is not TOML: {problem}.") from problem
    name = ctx.command.name or ""
    found = document.get(name, {})
    if not isinstance(found, dict) or not found:
        tables = ", ".join(f"[{key}]" for key in document) or "nothing"
        raise DataError(f"{path} has no table [{name}]; it has {tables}.")
    known = {_spelt(other): other for other in ctx.command.params if isinstance(other, click.Option)}
    values: dict[str, Any] = {}
    for key, value in found.items():
        chosen = known.get(key.replace("_", "-"))
        if chosen is None or chosen is param or chosen.name is None:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            raise DataError(f"{path}: [{name}] has the unknown entry '{key}'.{hint}")
        if isinstance(value, list) and not chosen.multiple:
            value = ",".join(map(str, value))
        values[chosen.name] = value
    ctx.default_map = {**(ctx.default_map or {}), **values}


def _spelt(found: click.Option) -> str:
    """The option's long name without its dashes."""
    longest: str = max(found.opts, key=len)
    return longest.removeprefix("--").removeprefix("-")
