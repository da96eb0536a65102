"""A client's own predictor: a shared stream, corrected by a refinement stream that never leaves its client.

APFL (Fan et al.), second stage. Symbols as in the paper: Φ G the shared (primary) stream, Ψ refinement
features, β = `refinement_ridge`, λ = `balance`.

    Ψ = activation(X R + r)                                        (Eq. 11, which has no r: bias=False)
    P = (ΨᵀΨ + β I)^-1 Ψᵀ (Y - Φ G)                                (Eq. 13)
    scores = Φ G + λ Ψ P                                           (Eq. 14)

λ stands outside the objective that P minimises, so for λ != 1 the sum is not the minimiser of Eq. 1; it
is what `balance` chooses for rows that were not trained on, and β with it where that is asked for. Over
another shared model, Φ G stands for its `estimates`: the probabilities, for a network.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from fedsolve import container
from fedsolve.arrays import Array
from fedsolve.backends.activations import activate
from fedsolve.closedform.balance import RIDGES, UNINFORMED, choose_balance, choose_ridge
from fedsolve.closedform.projections import Projection, check_model, projection, projection_agreement
from fedsolve.closedform.refinement import RidgeSolution, RidgeSums
from fedsolve.closedform.sums import chunks
from fedsolve.errors import DataError
from fedsolve.federation.participant import ClientData
from fedsolve.labels import encode_labels, regression_targets
from fedsolve.model import Model, model_from_contents
from fedsolve.parameters import Description
from fedsolve.tables.preparation import Preparation

Chosen = float | Literal["auto"]
"""β or λ: given, or chosen by the client."""


@dataclass(frozen=True)
class Refinement:
    """How refinements are made, the same for every client: features Ψ, β and λ, each a number or "auto"."""

    width: int
    ridge: Chosen
    activation: str
    balance: Chosen
    seed: int
    bias: bool = True

    def __post_init__(self) -> None:
        if self.balance == "auto" and self.ridge == 0:
            raise DataError(
                "balance 'auto' needs refinement_ridge > 0: without a ridge, rows determine their own fit "
                "and leaving one out says nothing. Give a ridge, or a balance."
            )

    def features(self, shared: Model, inputs: Array) -> Array:
        """Ψ (rows, width) of inputs, which are centred and scaled as the shared stream's are."""
        preparation: Preparation | None = getattr(shared, "preparation", None)
        rows = inputs if preparation is None else preparation.apply(inputs)
        random = self.random(rows.shape[1])
        return activate(self.activation, random.apply(np.ascontiguousarray(rows, dtype=np.float64)))

    def random(self, inputs: int) -> Projection:
        """R and r, drawn apart from the projections of the shared stream."""
        return projection(self.seed, "refinement", 0, inputs, self.width, bias=self.bias)

    def fit(self, shared: Model, data: ClientData) -> PersonalModel:
        """The predictor of the client that owns `data`, from passes over its rows in small parts.

        Rows are read once, and once more for each of ridge and balance that is chosen ("auto"). Without rows
        it is the shared stream.
        """
        rows = _RefinementRows(self, shared, data)
        sums = RidgeSums(self.width, shared.outputs)
        weight, balance, ridge = rows.solve(sums, rows.absorb(sums), self.ridge, self.balance)
        return PersonalModel(shared, self, weight, balance, sums, ridge)


@dataclass(eq=False, repr=False)
class PersonalModel(Model):
    """One client's predictor: estimates of the shared stream plus balance times its own refinement.

    shared: the stream that everybody has. weight: P (refinement width, outputs). balance: λ.
    sums:   what further rows are added to; None where a file was saved without.
    ridge:  β that P was solved with, where the client chose it; `refinement_ridge` has it in any case.
    """

    family: ClassVar[str] = "personal"
    private: ClassVar[bool] = True

    shared: Model
    refinement: Refinement
    weight: Array
    balance: float
    sums: RidgeSums | None = None
    ridge: InitVar[Chosen | None] = None

    def __post_init__(self, ridge: Chosen | None) -> None:
        super().__init__(self.shared.features, self.shared.classes, self.shared.outputs)
        ridge = self.refinement.ridge if ridge is None else ridge
        if ridge == "auto":
            raise DataError(
                "refinement_ridge 'auto' is chosen by a fit: give the number that P was solved with."
            )
        self.refinement_ridge = float(ridge)

    def with_balance(self, balance: float) -> PersonalModel:
        """The same streams, balanced differently; 0 is the shared stream's estimates to the bit."""
        known: dict[str, Any] = {"kinds": (float,), "optional": False, "default": 0.0, "owner": type(self)}
        Description(name="balance", least=0, **known).check(balance)
        return self._with(balance=float(balance))

    def _with(self, **changed: Any) -> PersonalModel:
        made = dataclasses.replace(self, **{"ridge": self.refinement_ridge, **changed})
        made.calibration = self.calibration
        return made.described_as(self)

    def updated(self, data: ClientData) -> PersonalModel:
        """The predictor after more rows; `data` holds only the new ones.

        P equals that of a fit to all rows, old and new, up to rounding, at the cost of the new ones. The
        balance and a ridge that was chosen stay: leave-one-out needs every row, see `rebalanced`.
        """
        if self.sums is None:
            raise DataError(
                "this personal model was saved without its sums, so it cannot take more rows. Save it with "
                "growing=True, or personalise again on all rows."
            )
        sums = RidgeSums.from_arrays(self.sums.arrays())
        _RefinementRows(self.refinement, self.shared, self.shown(data)).absorb(sums)
        return self._with(weight=sums.solve(self.refinement_ridge).weight, sums=sums)

    def rebalanced(self, data: ClientData) -> PersonalModel:
        """The same streams with the balance that `balance="auto"` chooses; `data` holds all rows of P.

        With `refinement_ridge="auto"` the ridge is chosen again as well, and P is solved with it.
        """
        if self.sums is None or self.refinement.ridge == 0:
            raise DataError("choosing a balance needs the model's sums (growing=True) and a ridge > 0.")
        rows = _RefinementRows(self.refinement, self.shared, self.shown(data))
        weight, balance, ridge = rows.solve(self.sums, rows.absorb(), self.refinement.ridge, "auto")
        return self._with(weight=weight, balance=balance, ridge=ridge)

    def scores(self, features: Array) -> Array:
        scores = self.shared.estimates(features)
        if self.balance == 0:
            return scores
        for span in chunks(len(features), self.refinement.width):
            psi = self.refinement.features(self.shared, features[span])
            scores[span] += self.balance * (psi @ self.weight)
        return scores

    def save(self, path: str | os.PathLike[str], growing: bool = False) -> None:
        """Write the model file, for this client only: readable by its owner alone (mode 0600).

        It is as confidential as the rows. P lies in the span of their refinement features, whose projection
        is known, so a file made from few rows gives them away: a single row, completely.

        growing: also keep the sums, so that `updated` works after loading. They hold the client's own
            refinement features or their Gram matrix.
        """
        arrays, note = self.contents()
        if growing and self.sums is not None:
            arrays |= {f"sums.{name}": array for name, array in self.sums.arrays().items()}
        container.write_atomically(path, container.to_bytes(arrays, note, sealed=True), private=True)

    def arrays(self) -> dict[str, Array]:
        arrays, _ = self.shared.contents()
        return {"refinement": self.weight} | {f"shared.{name}": array for name, array in arrays.items()}

    def note(self) -> dict[str, Any]:
        # A ridge that was not chosen is among the parameters.
        chosen = {"refinement_ridge": self.refinement_ridge} if self.refinement.ridge == "auto" else {}
        return {
            "shared": self.shared.contents()[1],
            "balance": self.balance,
            **chosen,
            "parameters": dataclasses.asdict(self.refinement),
            **projection_agreement(self.refinement.seed),
        }

    @classmethod
    def restored(cls, arrays: dict[str, Array], note: dict[str, Any]) -> PersonalModel:
        check_model(note)
        shared = model_from_contents(container.with_prefix(arrays, "shared."), note["shared"])
        kept = container.with_prefix(arrays, "sums.")
        sums = RidgeSums.from_arrays(kept) if kept else None
        refinement, ridge = Refinement(**note["parameters"]), note.get("refinement_ridge")
        return cls(shared, refinement, arrays["refinement"], note["balance"], sums, ridge)


class _RefinementRows:
    """A client's rows as a refinement sees them, part by part: never all features at once."""

    def __init__(self, refinement: Refinement, shared: Model, data: ClientData) -> None:
        data.check_width(shared.features, "the model")
        weights = data.own_weights
        if weights is not None and not np.all(weights):
            # A row of weight zero does not count: it must not decide which form the ridge takes.
            rows = np.arange(len(data)) if data.rows is None else data.rows
            data = ClientData(data.source, data.labels, rows[weights > 0], data.weights, checked=True)
        self._refinement = refinement
        self._shared = shared
        self._data = data
        labels, weights = data.own_labels, data.own_weights
        self.codes = None if shared.classes is None else encode_labels(labels, shared.classes)
        self._values = regression_targets(labels, shared.outputs) if shared.classes is None else None
        self.weights = np.ones(len(data)) if weights is None else weights
        self._roots = np.sqrt(self.weights)

    def spans(self) -> Iterator[slice]:
        return chunks(len(self._data), self._refinement.width)

    def absorb(self, sums: RidgeSums | None = None) -> Array:
        """The shared stream's estimates, which are small enough to keep; every row is added to the sums."""
        estimates = np.empty((len(self._data), self._shared.outputs))
        for span in self.spans():
            inputs = self._inputs(span)
            estimates[span] = self._shared.estimates(inputs)
            if sums is not None:  # both factors of a sum carry the root of the weight
                root = self._roots[span, None]
                sums.add(self._features(inputs) * root, (self._targets(span) - estimates[span]) * root)
        return estimates

    def solve(
        self, sums: RidgeSums, estimates: Array, ridge: Chosen, balance: Chosen
    ) -> tuple[Array, float, float]:
        """P, balance and ridge, chosen by these rows where they are "auto"."""
        chosen = self.ridge(sums, estimates, balance) if ridge == "auto" else ridge
        solution = sums.solve(chosen)
        weighed = self.balance(solution, estimates) if balance == "auto" else float(balance)
        return solution.weight, weighed, chosen

    def ridge(self, sums: RidgeSums, estimates: Array, balance: Chosen) -> float:
        """The ridge for these rows, all of which the sums have seen, and this balance; see `balance`."""
        size = sums.size()
        if size == 0:  # no rows, or features that are all zero
            return UNINFORMED
        unit = size / float(np.sum(self.weights))
        ridges = unit * np.array(RIDGES)
        path, counted = sums.path(), self.weights[:, None]
        residuals = self._targets(slice(None)) - estimates
        inner, power = np.zeros(len(ridges)), np.zeros(len(ridges))
        for span, features in self._read(whole=path.short):
            each = path.left_out(ridges, features, residuals[span], self._roots[span])
            for position, answers in enumerate(each):
                inner[position] += np.sum(counted[span] * residuals[span] * answers)
                power[position] += np.sum(counted[span] * answers**2)
        chosen = choose_ridge(inner, power, float(np.sum(counted * residuals**2)), balance)
        return unit * UNINFORMED if chosen is None else float(ridges[chosen])

    def balance(self, solution: RidgeSolution, estimates: Array) -> float:
        """The balance for these rows, all of which the solution has seen; see `balance`."""
        residuals = self._targets(slice(None)) - estimates
        answers = np.empty_like(residuals)
        for span, features in self._read(whole=solution.short):
            answers[span] = solution.left_out(features, residuals[span], self._roots[span])
        return choose_balance(estimates, residuals, answers, self.codes, self.weights)

    def _read(self, whole: bool) -> Iterator[tuple[slice, Array]]:
        """Spans of rows with their Ψ: in parts, or all at once (short form)."""
        psi = (self._features(self._inputs(span)) for span in self.spans())
        if whole and len(self._data):
            yield slice(None), np.concatenate(list(psi))
        else:
            yield from zip(self.spans(), psi, strict=True)

    def _inputs(self, span: slice) -> Array:
        # As they are stored: a network reads bytes on another scale than numbers.
        return self._data.features(span, self._data.source.dtype)

    def _features(self, inputs: Array) -> Array:
        return self._refinement.features(self._shared, inputs)

    def _targets(self, span: slice) -> Array:
        if self._values is not None:
            return self._values[span].astype(np.float64)
        targets: Array = np.eye(self._shared.outputs)[self.codes[span]]  # type: ignore[index]
        return targets
