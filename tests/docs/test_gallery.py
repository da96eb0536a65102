"""The gallery of results: the page is what the files make, and a claim without a file says that it waits."""

from __future__ import annotations

import json

import pytest
from benchmarks import gallery


def test_the_page_is_what_the_command_makes() -> None:
    assert gallery.PAGE.read_text() == gallery.page(), "run python -m benchmarks.gallery"


def test_every_file_has_the_form_that_its_claim_knows() -> None:
    for claim in (claim for claims in gallery.CLAIMS.values() for claim in claims):
        path = gallery.RESULTS / claim.file
        if path.exists():
            sentence, table = claim.tell(gallery.read(path)[0])
            assert sentence
            assert len({len(row) for row in table}) <= 1
    assert "another form" not in gallery.page()


def test_another_number_in_a_file_is_another_page(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("heads.json", "exported.json"):
        (tmp_path / name).write_text((gallery.RESULTS / name).read_text())
    monkeypatch.setattr(gallery, "RESULTS", tmp_path)
    before = gallery.page()
    data = json.loads((tmp_path / "heads.json").read_text())
    data["results"]["rows"]["AFL"]["accuracy"] = 0.1234
    data |= {"date": "2026-01-02", "machine": {"processor": "an abacus", "cores": 10}}
    (tmp_path / "heads.json").write_text(json.dumps(data))
    after = gallery.page()
    assert "| AFL | 12.34 |" in after
    assert "| AFL | 12.34 |" not in before
    assert "date: 2026-01-02; machine: an abacus, 10 cores" in after
    assert before.count("date: committed") == after.count("date: committed") + 1
    assert "`python -m benchmarks.chaos" in after, "a claim without a file is listed with its command"
