"""A site that connects before the gate has said that it is open is told of afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedsolve.network.mailbox import Mailbox


def test_open_is_the_first_thing_told(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    mailbox = Mailbox(tmp_path, told.append)
    mailbox.trouble("a site came early")
    assert told == []
    mailbox.open()
    mailbox.trouble("another")
    assert [event["is"] for event in told] == ["open", "trouble", "trouble"]
