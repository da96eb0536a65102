"""The seed of a run comes from all sites, and from nobody in particular."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.container import from_bytes, to_bytes
from fedsolve.federation.method import opening
from fedsolve.privacy import joint_seed
from fedsolve.privacy.joint_seed import (
    SeedBook,
    SeedSite,
    about_opening,
    draw_seed,
    drawing_of,
)

from .setups import sign_as, verify

NAMES = ("east", "north", "south", "west")
SPEC = fs.LocalFederation.from_arrays(np.eye(4), np.arange(4) % 2, np.zeros(4, int)).describe()
METHOD = fs.DeepAFL(layers=1, width=8)
ABOUT = about_opening(opening(METHOD, SPEC))

FORGED = {"west": ["00", "00"]}

Meddle = Callable[[str, dict[str, Any]], dict[str, Any] | None]


class Post:
    """Sites whose letters a server may change (`meddle`) or lose."""

    def __init__(self, folder: Path | None = None, meddle: Meddle | None = None) -> None:
        self.folder, self.meddle = folder, meddle or (lambda name, note: note)
        self.sites = {name: self.start(name) for name in NAMES}

    def start(self, name: str) -> SeedSite:
        book = SeedBook(None if self.folder is None else self.folder / name)
        # Tests inject what a site draws.
        return SeedSite(name, sign_as(name), verify, book, random=lambda size: name.encode().ljust(size))

    def carry(
        self, channel: str, letters: Mapping[str, bytes], largest: int
    ) -> Iterator[tuple[str, bytes | Exception]]:
        for name, letter in letters.items():
            note = self.meddle(name, from_bytes(letter, what="", error=fs.TermError)[1])
            if note is None:
                yield name, TimeoutError("lost")
                continue
            try:
                yield name, self.sites[name].answer(to_bytes({}, note))
            except fs.FedsolveError as problem:
                yield name, problem


def asked(post: Post, letter: bytes) -> dict[str, Any]:
    return {
        name: from_bytes(site.answer(letter), what="", error=fs.TermError)[1]
        for name, site in post.sites.items()
    }


def test_all_sites_find_one_seed_and_answer_only_for_it() -> None:
    post = Post()
    seed = draw_seed(post, NAMES, ABOUT)
    assert draw_seed(post, NAMES, ABOUT) == seed  # a repeat is a repeat
    assert draw_seed(post, NAMES[:3], ABOUT) != seed
    for what in ("commit", "reveal", "seed"):
        another = {"ask": what, "run": "another", "about": ABOUT, "names": list(NAMES)}
        with pytest.raises(fs.TermError, match="a second seed is drawn for the same method and sites"):
            asked(post, to_bytes({}, another))
    book = post.sites["north"].book
    book.check(opening(fs.DeepAFL(layers=1, width=8, seed=seed), SPEC), NAMES)
    book.check(opening(fs.DeepAFL(layers=1, width=8, seed=seed), SPEC), None)
    book.check(opening(fs.AFL(), SPEC), NAMES)  # has no seed
    with pytest.raises(fs.TermError, match="was not drawn by all sites together"):  # a seed of other sites
        book.check(opening(fs.DeepAFL(layers=1, width=8, seed=seed), SPEC), NAMES[:3])
    book.check(opening(fs.DeepAFL(layers=2, width=8, ridge=1 + 1e-9, seed=seed), SPEC), NAMES)
    for method in (METHOD, fs.KernelAFL(seed=seed)):
        with pytest.raises(fs.TermError, match="was not drawn by all sites together"):
            book.check(opening(method, SPEC), NAMES)


def dropped(name: str, note: dict[str, Any]) -> dict[str, Any]:
    """The server leaves one site's number out, which it has seen."""
    if note["ask"] == "seed":
        return {**note, "numbers": {site: told for site, told in note["numbers"].items() if site != "west"}}
    return note


def test_a_dropped_reveal_gives_no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    post = Post(meddle=dropped)
    with pytest.raises(fs.CohortError, match=r"numbers of \['west'\] are missing"):
        draw_seed(post, NAMES, ABOUT)
    entry = post.sites["north"].book.entry(drawing_of(ABOUT, NAMES))
    assert entry is not None
    assert entry.keys() == {"about", "number", "commitments"}
    post.meddle = lambda name, note: note
    assert draw_seed(post, NAMES, ABOUT) == draw_seed(Post(), NAMES, ABOUT)  # with the same numbers
    # Without the rule the server may choose: with or without any site that it likes.
    monkeypatch.setattr(joint_seed, "check_all_shown", lambda bound, shown: None)
    chosen = draw_seed(Post(meddle=dropped), NAMES, ABOUT)
    assert chosen != draw_seed(Post(), NAMES, ABOUT)


@pytest.mark.parametrize(
    ("meddle", "words"),
    [
        (lambda name, note: note | {"commitments": note.get("commitments", {}) | FORGED}, "signed"),
        (lambda name, note: note | {"numbers": note.get("numbers", {}) | FORGED}, "signed"),
        (lambda name, note: note | ({"about": "x"} if note["ask"] == "reveal" else {}), "a second seed"),
        (lambda name, note: note | ({"ask": "reveal"} if note["ask"] == "commit" else {}), "to nothing"),
        (lambda name, note: None if (name, note["ask"]) == ("west", "reveal") else note, "drawing goes on"),
    ],
)
def test_a_server_that_meddles_is_refused(meddle: Meddle, words: str) -> None:
    with pytest.raises(fs.CohortError, match=words):
        draw_seed(Post(meddle=meddle), NAMES, ABOUT)


def test_a_number_is_shown_to_one_list_of_commitments(tmp_path: Path) -> None:
    post = Post(tmp_path)
    first = draw_seed(post, NAMES, ABOUT)
    post.sites = {name: post.start(name) for name in NAMES}  # all of them start again
    assert draw_seed(post, NAMES, ABOUT) == first
    forged = {name: [value.replace("0", "1"), by] for name, (value, by) in _commitments(post).items()}
    letter = {"ask": "reveal", "run": drawing_of(ABOUT, NAMES), "about": ABOUT, "names": list(NAMES)}
    with pytest.raises(fs.TermError, match="is not signed by"):
        asked(post, to_bytes({}, {**letter, "commitments": forged}))
    fewer = {name: told for name, told in _commitments(post).items() if name != "west"}
    with pytest.raises(fs.TermError, match="it is bound to those"):
        asked(post, to_bytes({}, {**letter, "commitments": fewer}))


def _commitments(post: Post) -> dict[str, list[str]]:
    letter = {"ask": "commit", "run": drawing_of(ABOUT, NAMES), "about": ABOUT, "names": list(NAMES)}
    return {name: [n["value"], n["signature"]] for name, n in asked(post, to_bytes({}, letter)).items()}
