"""The commands of a site and of a server, up to where the network begins."""

from __future__ import annotations

import asyncio
import json
import logging
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsolve.cli import keys as keys_command
from fedsolve.cli.output import Output
from fedsolve.cli.server import _choice_line
from fedsolve.cli.site_side import Diary
from fedsolve.errors import DataError
from fedsolve.experiments.reading import read_experiment
from fedsolve.network.answering import Event
from fedsolve.pages.words import LONGEST
from tests.command import fedsolve, refused
from tests.toy import RANDOM, opening, written

pytestmark = pytest.mark.network

CLIENT = ("client", "--name", "north", "--server", "127.0.0.1:9")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "data.npz", x=np.eye(6), y=np.arange(6) % 2)
    return tmp_path / "data.npz"


def test_help_needs_no_ciphers(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise DataError("this needs ciphers.")

    monkeypatch.setattr("fedsolve.cli.keys.require_ciphers", absent)
    for name in keys_command.keys.commands:
        assert fedsolve("keys", name, "--help").exit_code == 0
    refused(fedsolve("keys", "list"), 2, "this needs ciphers")


def test_the_folder_of_keys_may_come_from_the_environment(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSOLVE_KEYS", str(tmp_path / "elsewhere"))
    for words in (("server", "--clients", "3"), (*CLIENT, "--data", data)):
        found = fedsolve(*words)
        assert found.exit_code == 4
        assert "elsewhere" in found.stderr
        assert "elsewhere" not in fedsolve(*words, "--keys", "here").stderr


@pytest.mark.parametrize("address", ["host", "host:", "host:port", ":9092", "host:99999"])
def test_a_client_checks_the_address_first(address: str, data: Path) -> None:
    found = fedsolve("client", "--name", "north", "--server", address, "--data", data)
    refused(found, 2, f"{address!r} is not an address")
    assert [path.name for path in data.parent.iterdir()] == ["data.npz"]


def test_state_folders_and_what_was_sent_are_for_their_owner(data: Path) -> None:
    assert fedsolve("server", "--clients", "3").exit_code == 4
    assert fedsolve(*CLIENT, "--data", data).exit_code == 4
    for folder in ("fedsolve-server", "fedsolve-client-north"):
        assert stat.S_IMODE((data.parent / folder).stat().st_mode) == 0o700
    log = data.parent / "sent.jsonl"
    Diary(Output(quiet=True), log).enter(Event("told", "hello"))
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert json.loads(log.read_text())["text"] == "hello"


@pytest.mark.parametrize("allowed", [(), ("a.b:c", "d:e")])
def test_a_client_allows_what_it_was_told_to(
    allowed: tuple[str, ...], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedsolve.network.node import SiteNode

    seen: list[Any] = []
    monkeypatch.setattr(SiteNode, "serve", lambda node: seen.append(node._answerer.networks))
    words = [word for name in allowed for word in ("--allow-network", name)]
    found = fedsolve(*CLIENT, "--insecure", "--plain", "--data", data, *words)
    assert found.exit_code == 0, found.stderr
    assert seen == [allowed]


def test_a_message_cannot_steer_or_flood_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Output().note("site \x1b[2J\x1b]0;title\x07 says\nerror: \u202eall is well \x9b31m")
    Output().note("x" * 10**6)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "site \ufffd[2J\ufffd]0;title\ufffd says error: \ufffdall is well \ufffd31m"
    assert len(second) < LONGEST + 40
    assert "1,000,000 characters" in second


def test_a_sender_cannot_fill_the_log_of_the_gate(caplog: pytest.LogCaptureFixture) -> None:
    import httpx

    from fedsolve.network.doorway import Doorway
    from fedsolve.network.gate import _MOST_LINES, Gate
    from fedsolve.network.mailbox import Mailbox

    with Doorway("127.0.0.1", 0) as door:
        gate = Gate(Mailbox(Path("nowhere"), lambda event: None), None, door)

    async def knock() -> None:
        for host, count in (("10.0.0.1", 50), ("10.0.0.2", 1)):
            transport = httpx.ASGITransport(gate.app(), client=(host, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://gate") as client:
                for number in range(count):
                    assert (await client.get(f"/path-{number}")).status_code == 404

    def logged() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "fedsolve.gate"]

    with caplog.at_level(logging.WARNING, "fedsolve.gate"):
        asyncio.run(knock())
        assert [line.split()[1] for line in logged()] == ["10.0.0.1", "10.0.0.2"]
        for number in range(3 * _MOST_LINES):
            gate._once(f"from address {number}")
    assert len(logged()) == _MOST_LINES


def test_an_engine_that_cannot_measure_client_by_client_is_refused(tmp_path: Path) -> None:
    def file(engine: str | None) -> Path:
        text = opening("t", 0.1, 2, RANDOM, seeds=(0,), engine=engine)
        return written(tmp_path, text + '[[method]]\nmethod = "afl"\n[measure]\nlocal = true\n')

    assert read_experiment(file(None)).measure.local
    with pytest.raises(DataError, match="cannot measure 'local'"):
        read_experiment(file("ray"))


def test_a_server_says_what_was_compared_and_why_nothing_was() -> None:
    few = {"method": "afl", "loss": None, "chosen": True, "left_out": "480 rows are too few"}
    assert _choice_line(few, [few, few]) == ("not compared", "480 rows are too few; afl is taken")
    best, failed = {**few, "loss": 0.1}, {**few, "chosen": False}
    told = _choice_line(best, [best, {**best, "chosen": False}, failed])
    assert told == ("chosen", "afl, the best of 2 on rows held out")


def test_a_site_on_a_full_disk_hears_that_the_run_is_over(tmp_path: Path) -> None:
    heard = []
    diary = Diary(Output(quiet=True), tmp_path / "no such folder" / "sent.jsonl")
    diary.on_end = lambda event: heard.append(event.over)
    with pytest.raises(OSError, match="no such folder"):
        diary.enter(Event("told", "the run is complete", over=True))
    assert heard == [True]
