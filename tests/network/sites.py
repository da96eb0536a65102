"""Sites for the tests: digits in uneven parts, and what the textbook makes of changing cohorts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import fedsolve as fs
from fedsolve import registry
from fedsolve.errors import DataError
from tests.conftest import Dataset
from tests.oracle import DeepOracle

CLASSES = list(range(10))
NAMES = ("east", "north", "south", "west")
LATE = "late"
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Sites:
    """Rows of `data`, each owned by the site `names[owners[row]]`."""

    data: Dataset
    owners: np.ndarray
    names: tuple[str, ...] = NAMES

    @classmethod
    def of(cls, data: Dataset, names: tuple[str, ...] = NAMES, min_size: int = 0) -> Sites:
        owners = fs.partition.dirichlet(data.labels, len(names), alpha=0.1, seed=0, min_size=min_size)
        return cls(data, owners, names)

    def rows(self, name: str) -> np.ndarray:
        return np.flatnonzero(self.owners == self.names.index(name))

    def client_data(self, name: str) -> fs.ClientData:
        return fs.ClientData(self.data.features, self.data.labels, self.rows(name))

    def save(self, name: str, folder: Path) -> Path:
        """The site's rows as an npz file."""
        path = folder / f"{name}.npz"
        np.savez(path, x=self.data.features[self.rows(name)], y=self.data.labels[self.rows(name)])
        return path

    def local(self, names: tuple[str, ...] | None = None) -> fs.LocalFederation:
        """The same sites in one process."""
        members = [fs.Participant(name, self.client_data(name)) for name in names or self.names]
        return fs.LocalFederation(members, classes=CLASSES, workers=1)

    def difference_from_textbook(self, model) -> float:
        """From the textbook in which every W_t and Omega_t is computed over the rows of its own cohort."""
        cohorts = {name: record.cohort for record in model.history for name in record.solved}

        def rows(name: str) -> np.ndarray:
            return np.isin(self.owners, [self.names.index(site) for site in cohorts[name]])

        oracle = DeepOracle(model.layers, model.classifiers[0].shape[0]).fit(
            self.data.features,
            self.data.targets,
            classifier_rows=[rows(f"W{t}") for t in range(model.layers + 1)],
            block_rows=[rows(f"Omega{t + 1}") for t in range(model.layers)],
        )
        return oracle.largest_difference(model.classifiers, [block.omega for block in model.blocks])


def same_bits(first, second) -> bool:
    mine, theirs = first.contents()[0], second.contents()[0]
    return mine.keys() == theirs.keys() and all(mine[n].tobytes() == theirs[n].tobytes() for n in mine)


def small(key: str):
    """A registered method with parameters that make it quick."""
    kind = registry.method_class(key)
    if key == "fedbn":  # needs a network with BatchNorm
        return kind.trial()
    names = {field.name for field in dataclasses.fields(kind)}
    values = {
        "layers": 2,
        "width": 24,
        "refinement_width": 24,
        "ridge": 0.5,
        "rounds": 2,
        "epochs": 1,
        "exchange": "single",
    }
    given = {name: value for name, value in values.items() if name in names}
    try:
        return kind(**given)
    except DataError:  # some take a single round, or have no plan to choose
        given.pop("exchange", None)
        return kind(**{**given, **({"rounds": 1} if "rounds" in names else {})})


def relative_difference(first, second) -> float:
    """Largest difference of two models' arrays, each relative to the largest number in it."""
    mine, theirs = first.contents()[0], second.contents()[0]
    assert mine.keys() == theirs.keys()
    return max(
        float(np.abs(mine[name] - theirs[name]).max()) / max(float(np.abs(theirs[name]).max()), 1e-300)
        for name in mine
    )
