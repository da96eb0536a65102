"""The `fedsolve` command in this process, for tests."""

from __future__ import annotations

import json
import re
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
    """What a command says on stderr, but for the notes that a model is not kept, and how a file is read."""
    lines = result.stderr.splitlines(keepends=True)
    noted = re.compile(r"the model is not kept|warning: .* is read (with|as) ")
    return "".join(line for line in lines if not noted.match(line))


def refused(result: Result, code: int, *fragments: Any) -> None:
    """Assert a failure of this exit code: one line on stderr, nothing on stdout, no traceback."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    said = told(result)
    assert said.count("\n") == 1
    assert said.startswith("error: ")
    for fragment in fragments:
        assert str(fragment) in result.stderr
