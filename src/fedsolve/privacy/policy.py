"""What a site is willing to answer, written at the site: limits that hold before anything is computed.

A file policy.toml; what it does not name keeps its strict default:

    methods = ["afl", "deepafl"]
    width = 2048

    [parameters]
    layers = [1, 20]
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve import registry
from fedsolve.container import Array, read
from fedsolve.errors import DataError, TermError
from fedsolve.federation.client_data import ClientData
from fedsolve.federation.engine import Spec
from fedsolve.federation.messages import Chain, Request
from fedsolve.federation.parts import part_of
from fedsolve.labels import labels_from_note

_MATRICES = 4
"""Square matrices of a method's largest side that a client may have in memory at once."""


@dataclass(frozen=True)
class SitePolicy:
    """What a site answers. Sizes are in bytes.

    methods, statistics: names of methods, and of arrays in answers; all of them when None.
    parameters:  by name of a method's parameter, the smallest and the largest value.
    width:       longest side of a matrix that is made, sent or received.
    memory:      for the matrices of a request. bytes_up, exchanges: in one run.
    runs_per_rows: runs in which the same rows may take part.
    fewest_rows: of this site in all, and by how many rows two runs may differ, if they differ.
    fewest_rows_per_class: of each class that this site has.
    largest_number: in blocks of the model and in requests.
    changing:    whether sums are opened that lack a site, and a run's cohort may change.
    colluders:   sites that might side with the server.
    joint_seed:  whether a method's seed must have been drawn by all sites together.
    verified:    whether sites must have checked a question against the totals that were opened, where a run
                 has enough of them for that. signatures: how many must have; 0: more than half of the sites.
                 A number refuses runs of fewer sites than can check.
    """

    methods: tuple[str, ...] | None = None
    parameters: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    statistics: tuple[str, ...] | None = None
    width: int = 4096
    memory: int = 2 << 30
    bytes_up: int = 4 << 30
    exchanges: int = 200
    runs_per_rows: int = 20
    fewest_rows: int = 20
    fewest_rows_per_class: int = 1
    largest_number: float = 1e9
    changing: bool = False
    colluders: int = 0
    joint_seed: bool = True
    verified: bool = True
    signatures: int = 0

    @classmethod
    def from_file(cls, path: str | Path) -> SitePolicy:
        """The policy in a TOML file; unknown names and wrong types are refused."""
        try:
            given = tomllib.loads(read(path).decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
            raise DataError(f"the policy {path} is not TOML ({problem}).") from problem
        names = {part.name for part in dataclasses.fields(cls)}
        for name, value in given.items():
            if name not in names:
                close = get_close_matches(name, names, 1)
                hint = f" Did you mean '{close[0]}'?" if close else f" It may have {sorted(names)}."
                raise DataError(f"the policy {path} has an unknown entry '{name}'.{hint}")
            given[name] = _value(path, name, value)
        return cls(**given)

    # -- what is refused ---------------------------------------------------------------------------

    def check_rows(self, data: ClientData) -> None:
        """Refuse to take part with few rows. The numbers stay out of what the server hears."""
        if len(data) < self.fewest_rows:
            raise DataError(
                f"this site has {len(data)} rows, and its policy asks for {self.fewest_rows} (fewest_rows)."
            )
        if self.fewest_rows_per_class > 1 and data.labels.ndim == 1:
            classes, counts = np.unique(data.own_labels(), return_counts=True)
            if counts.min() < self.fewest_rows_per_class:
                raise DataError(
                    f"this site has {counts.min()} rows of class {classes[counts.argmin()]}, and its policy "
                    f"asks for {self.fewest_rows_per_class} (fewest_rows_per_class)."
                )

    def check_part(self, rows: int, all_rows: int) -> None:
        """Refuse a question about few rows, or about all but few."""
        if min(rows, all_rows - rows) < self.fewest_rows:
            raise DataError(
                f"asked about a part of {rows} of this site's {all_rows} rows; its policy asks for "
                f"{self.fewest_rows} in it and outside of it (fewest_rows)."
            )

    def check_opening(self, opening: Mapping[str, Any]) -> None:
        """Refuse a method, its parameters, or a width that this site does not agree to."""
        key, parameters = str(opening["method"]), dict(opening["parameters"])
        if self.methods is not None and key not in self.methods:
            raise TermError(f"this site's policy allows the methods {list(self.methods)}, not '{key}'.")
        for name, (least, most) in self.parameters.items():
            value = parameters.get(name)
            if isinstance(value, int | float) and not least <= value <= most:
                raise TermError(
                    f"this site's policy allows '{name}' from {least:g} to {most:g}; asked is {value:g}."
                )
        method = registry.method_class(key)(**parameters)
        classes = labels_from_note(opening["classes"])
        spec = Spec(int(opening["features"]), classes, int(opening["outputs"]), "bytes")
        side = max(int(method.largest_side(spec)), spec.features, spec.outputs)
        if side > self.width:
            raise TermError(
                f"'{key}' makes matrices of width {side:,}; this site's policy allows {self.width:,}."
            )
        needed = _MATRICES * 8 * side**2
        if needed > self.memory:
            raise TermError(
                f"'{key}' at width {side:,} takes about {needed / 1e9:.1f} GB of memory; this site's policy "
                f"allows {self.memory / 1e9:.1f} (memory)."
            )

    def check_arrays(self, arrays: Mapping[str, Array], what: str) -> None:
        """Refuse arrays whose sides or numbers are beyond what this site agrees to."""
        for name, array in arrays.items():
            if array.nbytes > self.memory or (array.ndim == 2 and max(array.shape) > self.width):
                raise TermError(
                    f"{what}: '{name}' has shape {array.shape}; this site's policy allows matrices with "
                    f"sides of {self.width:,}, and {self.memory / 1e9:.1f} GB (width, memory)."
                )
            largest = float(np.abs(array).max()) if array.size and array.dtype.kind in "fiu" else 0.0
            if not largest <= self.largest_number:  # NaN fails every comparison
                raise TermError(
                    f"{what}: '{name}' has numbers up to {largest:.3g}; this site's policy allows "
                    f"{self.largest_number:.3g} (largest_number)."
                )

    def check_statistics(self, names: Iterable[str]) -> None:
        """Refuse to answer with arrays that this site does not agree to."""
        if self.statistics is not None and (others := sorted(set(names) - set(self.statistics))):
            raise TermError(f"this site's policy allows {list(self.statistics)}; asked for are {others}.")


class PolicyGuard:
    """Holds what a participant is asked to a policy, before each of its steps."""

    def __init__(self, policy: SitePolicy) -> None:
        self.policy = policy
        self._seen: set[str] = set()

    def check(self, request: Request, chain: Chain, data: ClientData) -> None:
        """Refuse a request, by name, that the policy forbids."""
        policy = self.policy
        policy.check_rows(data)
        part = part_of(request, chain)
        if part is not None:
            policy.check_part(len(part.of(data)), len(data))
        policy.check_arrays(request.arrays, f"the request '{request.kind}'")
        if request.position:
            for place, block in enumerate(chain.blocks):
                if chain.digests[place + 1] in self._seen:
                    continue
                if place == 0:
                    policy.check_opening(block.note["opening"])
                policy.check_arrays(block.arrays, f"block {place} of the model")
                self._seen.add(chain.digests[place + 1])


def _value(path: str | Path, name: str, value: Any) -> Any:
    """An entry of a policy in the type of its field."""
    default = SitePolicy.__dataclass_fields__[name].default
    if name in ("methods", "statistics"):
        good = isinstance(value, list) and all(isinstance(each, str) for each in value)
        made: Any = tuple(value) if good else None
    elif name == "parameters":
        ranges = value.values() if isinstance(value, dict) else [None]
        good = all(isinstance(r, list) and len(r) == 2 and all(map(_is_number, r)) for r in ranges)
        made = {key: tuple(r) for key, r in value.items()} if good else None
    elif isinstance(default, bool):
        good, made = isinstance(value, bool), value
    else:
        good = _is_number(value) and value >= 0 and (isinstance(default, float) or isinstance(value, int))
        made = value
    if not good:
        raise DataError(f"the policy {path}: '{name}' cannot be {value!r}.")
    return made


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
