"""The page "Three sites, one model", followed command by command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import fedsolve as fs

from . import tutorial

pytestmark = [pytest.mark.slow, pytest.mark.network]


def test_the_page_works_as_written(tmp_path: Path) -> None:
    machines = tutorial.run(tmp_path, server="localhost", fresh=False)
    server = machines["server"]
    model = fs.load_model(server.folder / "model.safetensors")
    assert [str(name) for name in model.classes] == sorted(
        ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    )
    report = json.loads((server.folder / "fedsolve-server" / "report.json").read_text())
    assert all(record["error_bounds"] for record in report["history"])
    assert "SECURE SUMS: this server sees totals" in server.said()
    for site in tutorial.SITES:
        said = machines[site].said()
        assert re.search(r"wire +3 at both ends", said)
        assert f"the server knows this site as {site}" in said
        assert "SECURE SUMS: what this site sends is masked" in said
        sent = [
            json.loads(line)
            for line in (machines[site].folder / f"fedsolve-client-{site}" / "sent.jsonl")
            .read_text()
            .splitlines()
        ]
        masked = [entry for entry in sent if entry["text"].startswith("sent the masked answer")]
        assert [entry["about"]["cohort"] for entry in masked] == [sorted(tutorial.SITES)] * len(masked)
        (opening,) = [
            block["note"]["opening"]
            for entry in masked
            for block in entry["about"]["asked"]["blocks"][:1]
            if "opening" in block["note"]
        ]
        assert (opening["method"], opening["parameters"]["layers"]) == ("deepafl", 2)
        assert (machines[site].folder / f"fedsolve-client-{site}" / "sent.jsonl").exists()
        accuracy = re.search(r"accuracy\D+([\d.]+) %", said)
        assert accuracy is not None, said[-2000:]
        # A site alone cannot know the classes that it never saw; this model knows all ten.
        assert float(accuracy[1]) > 85
    log = (server.folder / "fedsolve-server" / "gate.log").read_text()
    assert "refused" not in log


def test_private_keys_stay_where_they_were_made(tmp_path: Path) -> None:
    """What the page has carried about, it may carry: no private key is among it."""
    carried = [block.text for block in tutorial.blocks(tutorial.PAGE.read_text()) if "carry" in block.words]
    assert len(carried) == 2
    assert not any(".key" in text for text in carried)
