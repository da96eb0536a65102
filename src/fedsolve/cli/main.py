"""The `fedsolve` command: its group, its errors and its exit codes.

An error is one line on stderr, `error: ...`, and an exit code. With --json stdout still holds exactly one
document: {"error": {"kind": ..., "message": ..., "exit_code": ...}}.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from fedsolve.cli.options import ExamplesGroup
from fedsolve.cli.output import Interrupted, warnings_told
from fedsolve.errors import DivergenceError, FedsolveError
from fedsolve.pages.words import harmless, one_line
from fedsolve.version import __version__
from fedsolve.watching.log_lines import LOG, end_lines, say

_OWN = "demo methods train personalise predict info features experiment "
_OWN += "server client keys certificate doctor"
_STATISTICS = "describe glm cox survival mixed release fit"
COMMANDS = {name: name for name in _OWN.split()}
COMMANDS |= {name: f"{name}_command" for name in ("schema", "status", "files")}
COMMANDS |= {"evaluate": "predict", "export": "info", "datasets": "features"}
COMMANDS |= {"report": "experiment", "audit": "client"}
COMMANDS |= dict.fromkeys(_STATISTICS.split(), "statistics_commands")
"""In which module of this package a command is; it is imported when the command is given."""


class CommandGroup(ExamplesGroup):
    """A group that turns every error into one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self.commands, *COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.commands or cmd_name not in COMMANDS:
            return self.commands.get(cmd_name)
        found: click.Command = getattr(import_module(f"fedsolve.cli.{COMMANDS[cmd_name]}"), cmd_name)
        return found

    def main(self, args: Sequence[str] | None = None, *rest: Any, **settings: Any) -> NoReturn:
        words = list(sys.argv[1:] if args is None else args)
        given = words[: words.index("--")] if "--" in words else words
        settings |= {"standalone_mode": False, "prog_name": "fedsolve"}
        code = 0
        try:
            with warnings_told():
                result = super().main(words, *rest, **settings)
            code = result if isinstance(result, int) else 0
        except BaseException as problem:  # the one place where errors become exit codes
            if isinstance(problem, SystemExit):
                raise
            code = _report(problem, as_json="--json" in given, debug="--debug" in given)
        finally:
            if LOG.handlers:  # a command may have begun a log
                end_lines()
        sys.exit(code)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        with formatter.section("Exit codes"):
            codes = (
                ("1", "checked, and outside the paper's interval; anything unforeseen"),
                ("2", "usage or data"),
                ("3", "participants or network"),
                ("4", "files"),
                ("5", "diverged, or a model with NaN"),
                ("130", "interrupted"),
            )
            formatter.write_dl(codes)


def _report(problem: BaseException, as_json: bool, debug: bool) -> int:
    kind, code, message = _verdict(problem)
    if debug or os.environ.get("FEDSOLVE_DEBUG", "") not in ("", "0"):
        traceback.print_exception(problem)
    if as_json:
        error = {"kind": kind, "message": message, "exit_code": code}
        click.echo(json.dumps({"error": error}, indent=2))
    say(harmless(message), "error", kind=kind, exit_code=code)
    return code


def _verdict(problem: BaseException) -> tuple[str, int, str]:
    message = one_line(str(problem))
    if isinstance(problem, Interrupted | click.Abort | KeyboardInterrupt):
        return "interrupted", 130, message or "interrupted."
    if isinstance(problem, click.ClickException):
        message = one_line(problem.format_message())
        context = problem.ctx if isinstance(problem, click.UsageError) else None
        if context is not None:
            end = "" if message.endswith((".", "?")) else "."
            message = f"{message}{end} See '{context.command_path} --help'."
        return "usage", 2, message
    cause: BaseException | None = problem
    while cause is not None and not isinstance(cause, DivergenceError):
        cause = cause.__cause__
    if isinstance(known := cause or problem, FedsolveError):
        return known.kind, known.exit_code, message
    if isinstance(problem, OSError):
        where = f"{problem.filename}: " if problem.filename else ""
        return "file", 4, f"{where}{problem.strerror or problem}."
    if isinstance(problem, MemoryError):
        told = message or "out of memory"
        message = f"not enough memory ({told}). Use a smaller --width, fewer categories or fewer rows."
        return "data", 2, message
    unforeseen = f"unforeseen {type(problem).__name__}: {message.rstrip('.')}."
    return "internal", 1, f"{unforeseen} Run again with --debug and report it."


@click.group(cls=CommandGroup, invoke_without_command=True)
@click.version_option(__version__, prog_name="fedsolve", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Federated learning by solving, not by descending: exact closed-form models across data silos.

    # local models, FedAvg, AFL and DeepAFL on embedded data, in about a minute
    fedsolve demo
    # train across 20 simulated clients, then use the model
    fedsolve train data.npz --method deepafl --clients 20 --out model.safetensors
    fedsolve evaluate model.safetensors data.npz
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
