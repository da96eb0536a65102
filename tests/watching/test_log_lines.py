"""Logs: every line is one object without colours, in files that stay small; of commands and children."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from fedsolve.watching import log_lines
from tests.command import fedsolve

CHILD = """
import logging, sys
from fedsolve.watching import log_lines
log_lines.begin("child")
other = logging.getLogger("uvicorn")
other.warning("\\x1b[93mWARNING\\x1b[0m the disk is \\x9b31m nearly full")
print("\\x1b[1mprinted\\x1b[0m", 3, end="\\n\\n")
logging.getLogger("fedsolve.child").info("site %s", "north", extra={"fields": {"site": "north"}})
for number in range(int(sys.argv[1])):
    logging.getLogger("fedsolve.child").info("line %s %s", number, "x" * 1000)
{}["nothing"]
"""


@pytest.mark.parametrize("style", ["text", "json"])
def test_all_that_a_process_writes_is_lines_of_one_form(style, tmp_path, monkeypatch):
    path = tmp_path / "child.log"
    for name, value in log_lines.for_child(style, path).items():
        monkeypatch.setenv(name, value)
    with open(path, "ab") as stream:
        done = subprocess.run([sys.executable, "-c", CHILD, "0"], check=False, stdout=stream, stderr=stream)
    assert done.returncode == 1
    text = path.read_text()
    assert not any(sign in text for sign in ("\x1b", "\x9b"))
    lines = text.splitlines()
    if style == "text":
        assert [line.split()[1:3] for line in lines[:2]] == [["child", "WARNING"], ["child", "INFO"]]
        assert lines[1].endswith("printed 3")
        assert log_lines.message_of(lines[-1]) == "KeyError: 'nothing'"
        return
    told = [json.loads(line) for line in lines]
    assert all(set(one) == {"time", "level", "process", "message", "fields"} for one in told)
    assert {one["process"] for one in told} == {"child"}
    assert told[0]["message"] == "WARNING the disk is \ufffd31m nearly full"
    assert (told[0]["level"], told[0]["fields"]) == ("WARNING", {"logger": "uvicorn"})
    assert told[1]["message"] == "printed 3"
    assert (told[2]["message"], told[2]["fields"]) == ("site north", {"site": "north"})
    assert told[-1]["message"] == "KeyError: 'nothing'"  # what the interpreter says at the end


def test_a_log_begins_anew_while_its_process_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(log_lines, "MOST", 40_000)
    path = tmp_path / "server.log"
    handler = log_lines.LogFile(path, "json", "server")
    other = open(path, "ab", buffering=0)  # noqa: SIM115 - another writer of the same file, as a child's stderr
    logger = logging.Logger("fedsolve")
    logger.addHandler(handler)
    for number in range(100):
        logger.info("line %s %s", number, "x" * 1000)
        other.write(b"%d\n" % number)
    other.close()
    handler.close()
    kept = path.with_name("server.log.1")
    assert path.stat().st_size < 45_000
    assert kept.stat().st_size < 45_000
    lines = [line for each in (kept, path) for line in each.read_text().splitlines()]
    numbers = [int(json.loads(line)["message"].split()[1]) for line in lines if line.startswith("{")]
    assert numbers == list(range(numbers[0], 100))
    assert len(numbers) > 40
    assert lines[-1] == "99"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_command_says_errors_and_warnings_in_the_style_of_its_log(tmp_path):
    words = ("server", "--insecure", "--plain", "--clients", "1", "--min-clients", "1", "--log", "json")
    done = fedsolve(*words, "--keys", "k")
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    told = json.loads(line)
    assert (told["level"], told["process"]) == ("ERROR", "server")
    assert told["fields"] == {"kind": "usage", "exit_code": 2}
    assert "--insecure uses no keys" in told["message"]
    again = fedsolve(*words[:-2], "--keys", "k")  # what one command began does not outlast it
    assert again.stderr.startswith("error: --insecure")
    assert not logging.getLogger("fedsolve").handlers
