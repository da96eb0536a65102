"""What a server of secure sums still knows after a restart: the setup, the question under way, its cohort.

    FOLDER/course.json           the run: its name, epoch and slot, its cohort, the totals opened, their sizes
    FOLDER/setup.safetensors     what the members sent in the setup, all of it public or sealed
    FOLDER/training.json         which training is under way, and which sites check its questions
    FOLDER/seed.json             the seed that all clients drew
    FOLDER/masked.safetensors    the sum of masked terms and whose they are, before anybody has to open it
    FOLDER/census.safetensors    what shows the latest stage of the census
    FOLDER/evidence.safetensors  what shows the latest total to the sites that check questions

Without a folder there is no store; a run that stops then begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve.container import Shelf, from_parts, to_parts
from fedsolve.privacy.census import CensusStage
from fedsolve.privacy.ledger import Opening
from fedsolve.privacy.notes import Setup
from fedsolve.privacy.ring import Layout
from fedsolve.privacy.unmasking import Evidence, Server, WordSum


@dataclass(frozen=True)
class Asked:
    """A question under way: the digest of its request, its slot, who is asked, and the layout of answers."""

    request: str
    slot: int
    cohort: tuple[str, ...]
    layout: Layout


@dataclass
class Course:
    """A run as its server knows it.

    opening: digest of the block that names the method; None until the first request.
    invited: who is asked for keys in a setup under way. members: who took part in the last one.
    cohort:  whom the last total is over.
    opened:  all totals that anybody was asked to open, in order. sizes: of `KnownTotals`.
    census:  history of the rows of this run, by its census; None before it is complete.
    stage:   of the census, where one is under way. accounts: histories that each client can go on from.
    """

    run: str
    slots: int
    opening: str | None = None
    epoch: int = -1
    slot: int = 0
    invited: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    cohort: tuple[str, ...] | None = None
    opened: list[Opening] = field(default_factory=list)
    sizes: list[list[Any]] = field(default_factory=list)
    census: str | None = None
    stage: CensusStage | None = None
    accounts: dict[str, list[Any]] = field(default_factory=dict)
    asked: Asked | None = None

    def note(self) -> dict[str, Any]:
        opened = [(opening.request, opening.cohort) for opening in self.opened]
        asked = self.asked and {**vars(self.asked), "layout": self.asked.layout.note()}
        stage = self.stage and self.stage.note()
        return to_parts({**vars(self), "opened": opened, "asked": asked, "stage": stage}, "a run")[1]

    @classmethod
    def from_note(cls, note: dict[str, Any]) -> Course:
        values = from_parts({}, note)
        values["opened"] = [Opening(values["run"], *told) for told in values["opened"]]
        if values["stage"] is not None:
            values["stage"] = CensusStage.from_note(values["stage"], values["run"])
        if (asked := values["asked"]) is not None:
            values["asked"] = Asked(**{**asked, "layout": Layout.from_note(asked["layout"])})
        return cls(**values)


class RunStore(Shelf):
    """The folder of one run."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "Put a copy of it back, or start a new run in another folder.")
        self._course = self.kept("course.json", lambda _, note: Course.from_note(note))

    def resume(self, opening: str) -> Course | None:
        """The run that this folder holds, once, if it began with this opening."""
        course, self._course = self._course, None
        return course if course is not None and course.opening == opening else None

    def keep_setup(self, server: Server) -> None:
        """Write down what the members sent in a setup."""
        values = {
            "keys": {name: np.frombuffer(keys.letter, np.uint8) for name, keys in server.keys.items()},
            "shares": {name: np.frombuffer(letter, np.uint8) for name, letter in server.shares.items()},
        }
        arrays, note = to_parts(values, "a setup")
        self.keep("setup.safetensors", {**note, "setup": vars(server.setup)}, arrays)

    def server(self, run: str, epoch: int) -> Server | None:
        """The server of the setup that was written down; None where that of this epoch was not completed."""

        def make(arrays: dict[str, Any], note: dict[str, Any]) -> Server | None:
            server = Server(Setup.from_note(note.pop("setup")))
            if (server.setup.run, server.setup.epoch) != (run, epoch):
                return None
            kept = from_parts(arrays, note)
            for name, letter in kept["keys"].items():
                server.add_keys(name, letter.tobytes())
            server.keys_for(server.members[0])
            for name, letter in kept["shares"].items():
                server.add_shares(name, letter.tobytes())
            return server

        return self.kept("setup.safetensors", make)

    def keep_sum(self, slot: str, masked: WordSum, survivors: tuple[str, ...]) -> None:
        """Write down a sum of masked terms before anybody has to open it."""
        note = {"slot": slot, "wide": masked.wide, "survivors": list(survivors)}
        self.keep("masked.safetensors", note, {"limbs": masked.limbs, "carries": masked.carries})

    def sum(self, slot: str) -> tuple[WordSum, tuple[str, ...]] | None:
        """The sum of masked terms in this slot and whose they are, if it was written down."""

        def make(arrays: dict[str, Any], note: dict[str, Any]) -> tuple[WordSum, tuple[str, ...]] | None:
            masked = WordSum(arrays["limbs"], note["wide"], arrays["carries"])
            return (masked, tuple(note["survivors"])) if note["slot"] == slot else None

        return self.kept("masked.safetensors", make)

    def census(self, setup: Setup) -> bytes:
        """What clients of this setup are told of the latest stage of a census; empty where there is none."""
        this = self.kept("census.safetensors", lambda _, note: note["setup"] == vars(setup))
        return (self.read("census.safetensors") or b"") if this else b""

    def evidence(self, training: str) -> Evidence | None:
        """What shows the latest total of a training, if that was written down."""

        def make(arrays: dict[str, Any], note: dict[str, Any]) -> Evidence | None:
            return Evidence.from_parts(arrays, note["evidence"]) if note["training"] == training else None

        return self.kept("evidence.safetensors", make)

    def note(self, name: str) -> dict[str, Any] | None:
        """What was written down under this name: the training under way, or the seed that was drawn."""
        return self.kept(f"{name}.json", lambda _, note: note)
