"""The `fedsolve` command in this process, for tests."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner, Result

from fedsolve.cli.main import main


def fedsolve(*words: Any) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(main, [str(word) for word in words])


def document(*words: Any) -> Any:
    """The JSON a command prints, which must be all there is on stdout."""
    result = fedsolve(*words, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def told(result: Result) -> str:
    """What a command says on stderr, but for the note that a model is not kept."""
    lines = result.stderr.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("the model is not kept"))


def refused(result: Result, code: int, *fragments: Any) -> None:
    """Assert a failure of this exit code: one line on stderr, nothing on stdout, no traceback."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    said = told(result)
    assert said.count("\n") == 1
    assert said.startswith("error: ")
    for fragment in fragments:
        assert str(fragment) in result.stderr
