"""What a site tells about its rows, over all questions that were ever asked: three rules.

1. Cells. Rows live in cells: class by fold by batch of arrival. Every answer is about whole cells, so
   whatever a server adds and subtracts, it learns at most the sum of a cell (`federation.folds` holds
   the steps of methods to it). A cell takes part when a census of the cohort (`census`) finds enough rows in
   it: this site's own, or the sum of all after `colluders` sites have taken their own off. Others wait. Rows
   of earlier totals stay, and stay with their cohort: what is missing would show as a difference.
2. Products. In a Gram matrix, a gradient or a Newton step the weights are themselves numbers of the rows. So
   there are at least `rows_per_width` rows for each column of weights, of all rows, of a fold and of a batch.
   A column, or a target, has other values than its commonest one in enough rows, and no combination of
   indicators singles a row out; else columns are left out. Several labels a row are such indicators; a run
   is refused, by label, where one of them would be left out.
3. Told. The different numbers told about the rows, over all answers, are at most a share `told` of the
   numbers that the rows hold. It is equation counting, not a proof.

Sites follow a census together. What a stage shows is kept beside the account before it, and is final once
this site has helped to open a sum that rests on it: all sites of that sum rested on it then.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve import registry
from fedsolve.arrays import Array
from fedsolve.container import Shelf, from_parts, to_parts
from fedsolve.errors import CohortError, DataError, TermError
from fedsolve.federation.client_data import TABLE_MOMENTS, ClientData, rows_for
from fedsolve.federation.cohort import departed
from fedsolve.federation.folds import (
    FOLDS,
    Part,
    RowCells,
    fold_numbers,
    part_of,
    row_digests,
    speaks_of_parts,
)
from fedsolve.federation.messages import Chain, Request, Term
from fedsolve.federation.method import flat_activations
from fedsolve.federation.participant import kind_of
from fedsolve.labels import encode_labels, labels_from_note
from fedsolve.pages.words import listed
from fedsolve.privacy import census
from fedsolve.privacy.census import DIVISIONS, LEVERAGE, STARTS, CensusStage, Limits
from fedsolve.privacy.ring import Layout

_INDICATOR = 1 / 6  # numbers that an indicator holds, and that a count of rows tells, against 1 of a number
_FINEST = 48  # folds that a question may speak of; it gets those of the cells that lie in its own
_SHARE = 2 / 3  # of the weight of a site's rows of a class, at most, for one row; of the cohort's it is less
_WARNED = 20.0  # rows for each column of weights below which a site warns
_filled = partial(np.nan_to_num, nan=-1.0)  # filled by a mean, it is neither 0 nor 1, and may set a row apart
_TWO_LIMBS = -1  # stands for the exponent of numbers that were too large for one limb

_AUC = ((2.0, 0.99), (5.0, 0.75), (20.0, 0.54))
"""How well membership was told from a Gram matrix (area under the curve), by rows for each column."""

_KNOWN = {"digest": np.uint64, "fold": np.uint8, "count": np.uint8, "batch": np.uint32}
"""What is kept of each row that took part: its keyed digest, its fold, of how many, and its batch."""

_KEPT = ("run", "told", "_seen", "_steps", "_widest", "_classes", "_labels", "_schema", "_book")
"""What a site writes down besides its accounts and classes."""


@dataclass(frozen=True)
class Account:
    """Which rows took part, as of one stage of a census.

    rows:     of this site, sorted by digest; see `_KNOWN`. size: of all sites.
    left_out: (batches, 2, features) columns left out of a batch, and of questions about its folds.
    numbers:  (features,) columns with other values than 0 and 1. crowded: what this site needs left out.
    history:  names the stages that led here. finished: whether a census ended here.
    """

    rows: Mapping[str, Array]
    left_out: Array
    numbers: Array
    crowded: Array
    size: int = 0
    by_class: bool = True
    cohort: tuple[str, ...] = ()
    history: str = ""
    finished: bool = True


NO_ACCOUNT = Account(
    {name: np.zeros(0, dtype=kind) for name, kind in _KNOWN.items()},
    left_out=np.zeros((0, 2, 0), dtype=bool),
    numbers=np.zeros(0, dtype=bool),
    crowded=np.zeros((2, 0), dtype=bool),
)
"""Of a site no row of which has taken part."""


@dataclass(eq=False, repr=False)
class Disclosure:
    """A site's account of what it has told, in memory or in a folder.

    key: with which rows are hashed and divided into folds, a secret of this site.
    changing: whether its rows may take part in sums over different cohorts.
    entering: False for a trial, whose account stays in memory. withdrawn: sites that have left.
    account:  the one in use, that of the stage shown last; `settle` makes it final.
    classes:  of this run's census; None if it has none.
    """

    limits: Limits
    key: bytes
    folder: Path | None = None
    changing: bool = False
    entering: bool = True
    withdrawn: Set[str] = frozenset()

    def __post_init__(self) -> None:
        self.told, self.run = 0.0, ""
        self._now = self.account = NO_ACCOUNT
        self.classes: Array | None = None
        self._classes: Any = None  # the same, as the census has them: what came in a letter can be written
        self._labels = self._widest = 0
        self._schema = ""
        self._book: dict[str, Any] = {}
        self._seen: set[str] = set()
        self._steps: dict[str, int] = {}
        self._sizes: dict[tuple[str, ...], float] = {}
        self._digests = lru_cache(maxsize=1)(partial(row_digests, key=self.key))
        self._shown: tuple[ClientData, Account, ClientData] | None = None
        if self.folder is not None:
            remedy = "Without it this site cannot know what it has told; it must sit out."
            self._shelf = Shelf(self.folder, remedy)
            self._written = self._parts()
            self._shelf.kept("cells", self._load)

    def accounts(self) -> list[list[Any]]:
        """Histories that this site can go on from, and whether a census ended there."""
        return [[one.history, one.finished] for one in (self._now, self.account)]

    # -- cells: which rows take part ---------------------------------------------------------------

    def counts(self, data: ClientData, stage: CensusStage) -> Term:
        """This site's part in a stage of a census."""
        self._follow(stage)
        if data.schema is not None and len(data.schema.labels) != stage.labels:
            raise TermError(f"the census counts {stage.labels} labels, the schema has {data.schema.labels}.")
        cap = stage.limits.fewest_rows
        if stage.name == "cells":
            own = self._fresh(data, stage)[-1]
            return Term({"cells": np.minimum(own, cap), "fresh": own[:, 0]})
        if stage.name == "crowded":
            return Term({"crowded": self.account.crowded.astype(np.float64)})
        values, folds, whole = self._last_batch(data, stage)
        if stage.name == "columns":
            numbers = (~np.isnan(values) & (values != 0) & (values != 1)).any(axis=0)
            # Whether indicators single a row out among this site's own, of all or of a fold.
            own = np.column_stack([_filled(values[:, ~numbers]), whole])
            parts = (own, *(own[folds == fold] for fold in range(FOLDS)))
            asked = [one for one in parts if len(one) and not numbers.all() and not self.limits.off]
            highest = (census.singled_out(one)[0] for one in asked)
            singled = any(leverage > LEVERAGE for leverage in highest)
            columns = census.column_counts(values, folds, cap)
            counts = {"rows": len(values), "singled": int(singled), "sites": int(len(values) > 0)}
            return Term({"columns": columns, "numbers": numbers.astype(np.float64)}, counts)
        return Term({"pairs": np.stack([some.T @ some for some in self._indicators(data, stage)])})

    def admit(self, data: ClientData, stage: CensusStage, total: Term, cohort: Sequence[str]) -> str:
        """Take a stage of a census in. Returns what the people at the site read about it."""
        history, following = stage.shown(total)
        if history != self.account.history:
            self._follow(stage)
            base = self.account
            if stage.name == "cells":
                made = self._with_batch(data, stage, total, tuple(cohort))
            else:
                made = self._taken(data, stage, total)
            self._now = base
            self.account = dataclasses.replace(made, history=history, finished=following is None)
            self.run, self._classes, self._labels = stage.run, stage.classes, stage.labels
            self.classes = labels_from_note(stage.classes)
            self._save()
        if not self.account.finished:
            return ""
        waiting = np.zeros(0, dtype=np.int64) if self.limits.off else np.flatnonzero(self._places(data) < 0)
        said, classes = f"{len(data) - len(waiting):,} of {len(data):,} rows take part", self.classes
        if len(waiting):
            said += f"; {len(waiting):,} wait"
            if classes is not None:
                few = classes[np.unique(_codes(data, classes)[waiting])]
                said += f" (class {', '.join(map(str, few))})"
        if (left := np.flatnonzero(self.account.left_out[-1:, 0].any(axis=0))).size:
            names = () if data.schema is None else (*data.schema.names, *data.schema.labels)
            what = f" ({listed([names[place] for place in left], 12)})" if names else ""
            said += (
                f"; {len(left)} columns{what} are left out, the same in all but few rows or set by few alone"
            )
        return f"{said}; told so far: {self.told:.0%}"

    def settle(self, run: str) -> None:
        """Note that this site helps to open a sum of a run, which makes the account it rests on final."""
        if self.run == run and self._now is not self.account:
            self._now = self.account
            self._save()

    def _follow(self, stage: CensusStage) -> None:
        """Go on from the history that a stage names; refused where this site has another."""
        own, asked = self.limits, stage.limits
        demands = ("fewest_rows", "colluders", "rows_per_width")
        if not own.off and any(getattr(asked, name) < getattr(own, name) for name in demands):
            raise TermError(
                f"the census is for fewest_rows {asked.fewest_rows}, colluders {asked.colluders} and "
                f"rows_per_width {asked.rows_per_width:g}; this site's policy asks for {own.fewest_rows}, "
                f"{own.colluders} and {own.rows_per_width:g}. All sites and the server must have the same."
            )
        known = [one for one in (self.account, self._now) if one.history == stage.history]
        if not known and not self.changing:
            raise CohortError(
                "this site's account of rows that took part is not the one that the other sites have: it, "
                "or theirs, is an older copy, or was begun anew. Put the newest one back."
            )
        if known and known[0] is not self.account:
            self.account = known[0]
        elif known and stage.run != self.run:
            self._now = known[0]
        if self.account.finished != (stage.name == "cells"):
            raise TermError(f"the stage '{stage.name}' of a census is not the one that follows here.")

    def _taken(self, data: ClientData, stage: CensusStage, total: Term) -> Account:
        """The account after a later stage of a census."""
        base, found = self.account, total.arrays
        left = base.left_out.copy()
        if stage.name == "columns":
            few = census.few_columns(found["columns"], stage.limits, int(total.counts["sites"]))
            if few[0, data.width + stage.labels :].any() and not self.limits.off:
                raise TermError(
                    "the target is the same in all but few rows, which its products would show (fewest_rows "
                    f"is {self.limits.fewest_rows}). Choose another target, or noise."
                )
            wide = data.width + stage.labels
            left[-1], numbers = few[:, :wide], base.numbers | (found["numbers"][:wide] > 0)
            size = base.size + int(total.counts["rows"])
            return dataclasses.replace(base, left_out=left, numbers=numbers, size=size)
        if stage.name == "pairs":
            wide = data.width + stage.labels
            flags, free = np.zeros((2, wide), dtype=bool), [each for each in stage.columns if each < wide]
            for place, some in enumerate(self._indicators(data, stage)):
                there = some[some.any(axis=1)]
                flags[min(place, 1), free] |= census.crowded(there, found["pairs"][place], len(free))
            flags[1] |= flags[0]
            return dataclasses.replace(base, crowded=flags)
        left[-1] |= found["crowded"] > 0
        return dataclasses.replace(base, left_out=left)

    def _with_batch(
        self, data: ClientData, stage: CensusStage, total: Term, cohort: tuple[str, ...]
    ) -> Account:
        """The account with the new rows whose cells are large enough, as a batch of their own."""
        base, limits, columns = self.account, stage.limits, data.width + stage.labels
        by_class = stage.classes is not None
        if base.size:
            self.check_known(data, cohort, by_class)
        else:
            flags = np.zeros((2, columns), dtype=bool)
            base = dataclasses.replace(NO_ACCOUNT, left_out=flags[None][:0], numbers=flags[0], crowded=flags)
            self.told, self._widest, self._seen = 0.0, 0, set()
            self._book.clear()
        self._schema = "" if data.schema is None else data.schema.digest
        if base.left_out.shape[-1] != columns:
            raise TermError(
                "earlier totals of these rows had other labels, which the account does not cover."
            )
        base = dataclasses.replace(base, cohort=cohort)
        if stage.shown(total)[1] is None:
            return base
        self._book.pop("times", None)  # with new rows, one grid does not tell what another lacks
        codes, hashes, new, own = self._fresh(data, stage)
        fresh, cells = total.arrays["fresh"], total.arrays["cells"]
        # The most folds that each class can be divided into with enough rows in each, of the sums of capped
        # counts; 0 where a class as a whole has too few.
        enough = cells >= limits.fewest_rows * (1 + limits.colluders)
        carried = np.zeros(len(cells), dtype=np.int64)
        for count, start in STARTS.items():
            carried[enough[:, start : start + count].all(axis=1)] = count
        carried *= enough[:, 0]
        # What was told before would be told of the new rows alone: they are as many as it takes, too.
        needed, alone = limits.rows_per_width * self._widest, own[:, 0] >= limits.fewest_rows
        whole = (carried > 0) & (fresh[carried > 0].sum() >= needed)
        alone &= whole.any() or own[alone, 0].sum() >= needed
        taken = new[(whole | alone)[codes[new]]]
        counts, folds = np.maximum(carried, 1)[codes[taken]], np.zeros(len(taken), dtype=np.uint8)
        for count in DIVISIONS[1:]:
            folds[counts == count] = fold_numbers(hashes[taken[counts == count]], count)
        more = [self._digests(data)[taken], folds, counts, np.full(len(taken), len(base.left_out))]
        joined = {
            name: np.concatenate([base.rows[name], new.astype(_KNOWN[name])])
            for name, new in zip(_KNOWN, more, strict=True)
        }
        order = np.argsort(joined["digest"], kind="stable")
        left = np.concatenate([base.left_out, np.ones((1, 2, columns), dtype=bool)])
        rows = {name: array[order] for name, array in joined.items()}
        by_class = by_class and (base.by_class or not base.size)
        return dataclasses.replace(base, rows=rows, left_out=left, by_class=by_class)

    def check_known(self, data: ClientData, cohort: Sequence[str], by_class: bool) -> None:
        """Refuse a run in which rows of earlier totals are missing, in another cohort, or divided anew."""
        base = self.account
        if self.limits.off:
            return
        if missing := len(base.rows["digest"]) - int((self._places(data) >= 0).sum()):
            why, back = "are missing or were changed", "Put them back as they were"
            if self._schema != ("" if data.schema is None else data.schema.digest):
                why = "are read by another schema now"
                back = (
                    "The first schema binds all questions about these rows: take it again (of --propose, "
                    "agreed-schema.json in the state folder), or begin anew, with new ledgers at all sites"
                )
            raise DataError(
                f"{missing:,} rows of earlier totals {why}; they would show as the difference of two totals. "
                f"{back}; what is new waits until it is enough."
            )
        before, now = {*base.cohort}, {*cohort}
        if now not in (before, before - self.withdrawn) and not self.changing:
            if gone := before - self.withdrawn - now:
                raise departed(gone, now)
            raise CohortError(
                f"{', '.join(sorted(now - before)[:5])} were not in earlier sums of this site's rows; the "
                "difference would show what they add. Let them join as three or more, where all allow "
                "changes (changing, in the policy), or train with noise (--epsilon)."
            )
        if by_class and not base.by_class:
            raise TermError("rows of this site took part without classes, and are not told apart by them.")

    def _last_batch(self, data: ClientData, stage: CensusStage) -> tuple[Array, Array, Array]:
        """(rows, columns) of the rows that were taken in last the features and, where there are no classes,
        the targets; the fold of three that each row is in; and (rows, classes) its class, or one for all."""
        places, last = self._places(data), len(self.account.left_out) - 1
        rows = self.account.rows
        there = (places >= 0) & (rows["batch"][places] == last if len(rows["batch"]) else False)
        here = places[there]
        cells = RowCells(here, rows["fold"][here], rows["count"][here])
        batch = data.taking(there)
        folds = fold_numbers(batch.within(cells).row_hashes(), FOLDS)
        values, classes = batch.features(slice(None)), labels_from_note(stage.classes)
        if classes is None:
            targets = np.asarray(batch.own_labels, dtype=np.float64)
            values = np.column_stack([values, targets.reshape(len(values), -1)])
        return values, folds, np.eye(1 if classes is None else len(classes))[_codes(batch, classes)]

    def _indicators(self, data: ClientData, stage: CensusStage) -> list[Array]:
        """The indicators of the last batch without what is left out, and its classes: of all rows, and of
        those of each fold."""
        values, folds, whole = self._last_batch(data, stage)
        left = np.zeros((2, values.shape[1]), dtype=bool)
        left[:, : data.width + stage.labels] = self.account.left_out[-1]
        columns = list(stage.columns)
        every, divided = (
            np.column_stack([(_filled(values) * ~some)[:, columns], whole])
            for some in (left[0], left.any(axis=0))
        )
        return [every, *(divided * (folds == fold)[:, None] for fold in range(FOLDS))]

    def rows(self, data: ClientData) -> ClientData:
        """The rows that take part, in their cells, without what was left out."""
        account = self.account
        if self.limits.off:
            return data
        if self._shown is None or self._shown[0] is not data or self._shown[1] is not account:
            places = self._places(data)
            inside = places >= 0
            if inside.sum() != len(account.rows["digest"]):
                raise DataError("rows have changed in the middle of this run. Put them back, or start anew.")
            here = places[inside]
            shown = data if inside.all() else data.taking(inside)
            left = account.left_out[account.rows["batch"][here], 0, : data.width]
            if left.any():
                values = shown.features(slice(None), shown.source.dtype)
                values = np.where(left, np.zeros((), dtype=values.dtype), values)
                shown = ClientData(
                    values, shown.own_labels, None, shown.own_weights, checked=True, schema=data.schema
                )
            folds, counts = (account.rows[name][here].astype(np.int64) for name in ("fold", "count"))
            divided = np.asarray(account.left_out[:, 1, : data.width].any(axis=0))
            codes, batches = _codes(shown, self.classes), account.rows["batch"][here].astype(np.int64)
            few = np.asarray(account.left_out[:, 0, : data.width].any(axis=0))
            cells = RowCells(codes, folds, counts, divided, batches, self._book, self.limits, few)
            self._shown = (data, account, shown.within(cells))
        return self._shown[2]

    def permit(self, request: Request, chain: Chain, rows: ClientData | None = None) -> None:
        """Refuse a question about few rows before anything is computed."""
        if request.position:
            check_method(chain)
        if self.limits.off:
            return
        if (part := part_of(request, chain)) is not None:
            self.check_part(part)
        blocks = chain.blocks if request.position else []
        if speaks_of_parts([request.note, *(block.note for block in blocks)]):  # or a member of the run does
            where = "a part of the rows; train without calibration and with settings that are given"
            self._check_labels(1, where)
        if not request.position:
            return
        opening = chain.opening
        if opening.get("classes") is not None and self.classes is None:
            raise TermError("this run has classes, and the census of its rows had none.")
        if len(opening.get("labels", ())) != self._labels:
            raise TermError("this run has other labels than the census of its rows had.")
        if self._labels:
            self._check_labels(0, "the rows; leave the label out", opening.get("labels", ()))
        # Two weightings of the classes would show the products of some classes alone.
        given = [each.arrays["class_weight"] for each in chain.blocks if "class_weight" in each.arrays]
        weights = [] if not given or np.all(given[0] == 1) else given[0].tolist()
        if request.kind != TABLE_MOMENTS and self._book.setdefault("class weights", weights) != weights:
            raise TermError(
                "products of these rows were told with other weights of their classes (class_weight), or "
                "with none; the difference would show classes by themselves, whose rows nobody counted by "
                "column. Weigh classes as before, or train with noise."
            )
        if rows is not None and rows.own_weights is not None:
            self._check_row_weights(rows, rows.own_weights)
        notes = [block.note.get("block", block.note) for block in chain.blocks]  # of members of the run too
        openings = [note["opening"]["parameters"] for note in notes if "opening" in note]
        for given in openings:
            plain = given.get("scale") != "standard" and request.kind != TABLE_MOMENTS
            size = self._size(rows, request.kind, chain) if plain and rows and "activation" in given else 1.0
            for name, chosen, gain in flat_activations(given, size):
                raise TermError(
                    f"{name}='{chosen}' with a gain of {gain:g} on numbers of about {size:.3g} can make "
                    "features that are equal for all but few rows, which would show these (fewest_rows is "
                    f"{self.limits.fewest_rows}). Choose 'gelu' or 'tanh', float64, a gain of at most 4, and "
                    "scale='standard'."
                )

    def disclosed(self, request: Request, chain: Chain, term: Term, layout: Layout) -> str:
        """Enter what an answer tells, or refuse it by a rule. Returns the share told so far, in words."""
        # Columns of weights in the widest product; and of how many folds the smallest part may be one.
        width = max((min(f.shape[-2:]) if len(f.shape) > 1 else 1 for f in layout.fields), default=1)
        blocks = chain.blocks if request.position else []
        parts = FOLDS if speaks_of_parts([request.note, *(block.note for block in blocks)]) else 1
        warning = self.check_products(width, parts)
        told = f"told so far: {self.tell(term, layout, width * parts, kind_of(request.kind).counts):.0%}"
        return told if warning is None else f"{told}; {warning}"

    def _size(self, rows: ClientData, kind: str, chain: Chain) -> float:
        """Root mean square of the numbers that the first projection of a run sees at this site."""
        about = (self.account.history, *chain.digests[1:3])  # opening and preparation
        if about not in self._sizes:
            shown = rows_for(rows, kind, chain, {})
            squares = sum(float(np.square(shown.features(span)).sum()) for span in shown.spans())
            self._sizes = {about: float(np.sqrt(squares / (len(shown) * shown.width)))}
        return self._sizes[about]

    def check_part(self, part: Part) -> None:
        """Refuse a question that divides rows finer than anybody needs, or rows that are too few for it."""
        most = int(self.account.rows["count"].max(initial=1))
        if part.count > _FINEST:
            raise TermError(
                f"asked about some of {part.count:,} folds; rows lie in {most}, so that every cell (class by "
                f"fold) keeps {self.limits.fewest_rows} rows (fewest_rows)."
            )
        if most == 1:
            raise TermError(
                "asked for a part of the rows; they are too few to be divided: not even two folds keep "
                f"{self.limits.fewest_rows} rows of a class (fewest_rows). Train without calibration and "
                "with settings that are given, not chosen."
            )

    # -- products ----------------------------------------------------------------------------------

    def _check_labels(self, of_fold: int, where: str, names: Sequence[str] = ()) -> None:
        """Refuse labels that too few rows have or lack: their sums would show those rows."""
        columns = self.account.left_out.shape[-1]
        few = np.flatnonzero(self.account.left_out[:, of_fold, columns - self._labels :].any(axis=0)).tolist()
        if few:
            told = ", ".join(repr(names[place]) if names else str(place) for place in few)
            raise TermError(
                f"too few rows have or lack the label {told} (fewest_rows is {self.limits.fewest_rows}) in "
                f"{where}."
            )

    def _check_row_weights(self, rows: ClientData, weights: Array) -> None:
        """Refuse weights of which one row has most in its class: each sum over the class would show it."""
        codes = np.zeros(len(rows), dtype=np.int64) if rows.cells is None else rows.cells.codes
        for code in np.unique(codes):
            own = weights[codes == code]
            if len(own) >= self.limits.fewest_rows and own.max() > _SHARE * own.sum():
                raise TermError(
                    f"one row has {own.max() / own.sum():.2f} of the weight of its class at a site, and at "
                    f"most {_SHARE:.2f} may be; sums over the class would show it. Bring the weights of rows "
                    "closer together."
                )

    def check_products(self, width: int, parts: int = 1) -> str | None:
        """Refuse products of few rows with many columns of weights; a warning where they are not many.

        parts: into how many the rows may be divided.
        """
        rows, least = self.account.size / parts, self.limits.rows_per_width
        if rows < least * width:
            raise TermError(
                f"asked for products with {width:,} columns over {rows:,.0f} rows; with fewer than {least:g} "
                f"rows for each column rows can be computed (rows_per_width). Choose a width of at most "
                f"{rows / least:,.0f}, such as by a seeded projection, or noise."
            )
        if least and width > 1 and rows < _WARNED * width:
            places, found = zip(*_AUC, strict=True)
            auc = np.interp(np.log(rows / width), np.log(places), found)
            return (
                f"{rows / width:.1f} rows for each of {width:,} columns: whether somebody's row is among "
                f"them can be told with an AUC of about {auc:.2f}"
            )
        return None

    # -- told --------------------------------------------------------------------------------------

    def tell(self, term: Term, layout: Layout, width: int = 1, counts: Collection[str] = ()) -> float:
        """Count the numbers of an answer that were not told before; refused beyond the limit.

        width: of its widest product, times the parts of the rows that it may be about.
        counts: arrays that the step declares to be numbers of rows. These are at most as many as the rows,
        and hold as little as indicators.
        """
        size, new = self.account.size, {f"{sorted(term.counts.items())}": _INDICATOR * len(term.counts)}
        steps: dict[str, int] = {}
        for field, place in layout.places:
            array, numbers = term.arrays.get(field.name, np.zeros(0)), place.stop - place.start
            if array.size:
                mark, declared = _content(array), field.name.rpartition(".")[2] in counts
                whole = declared and np.all((array >= 0) & (array <= size) & (array == np.rint(array)))
                new[mark] = _INDICATOR * min(numbers, size) if whole else numbers
                steps |= {} if field.exponent is None else {mark: field.exponent}
        # What the rows hold: their features and a label, an indicator a sixth.
        held = max(1, size) * (float(np.where(self.account.numbers, 1.0, _INDICATOR).sum()) + 1.0)
        more = sum(told for mark, told in new.items() if mark not in self._seen) / held
        if self.told + more > self.limits.told:
            raise TermError(
                f"with this answer {self.told + more:.0%} of the numbers that these rows hold would have "
                f"been told, {self.told:.0%} before it; this site allows {self.limits.told:.0%} (told). "
                "Choose a smaller width, fewer layers or steps, or let the sites allow more (policy.toml)."
            )
        if new.keys() - self._seen or steps.keys() - self._steps.keys():
            self.told += more
            self._widest = max(self._widest, width)
            self._seen |= new.keys()
            self._steps = {**steps, **self._steps}
            self._save()
        return self.told

    def rounded_otherwise(self, term: Term, layout: Layout) -> str | None:
        """An array that is asked for in one limb with another step than before; None if there is none.

        Every site rounds its own numbers, and says where they are too large for one limb: in many steps, both
        would narrow down what each of them has. Whatever the question is called, the same numbers have one.
        """
        for field in layout.fields:
            if field.exponent is None or field.name not in term.arrays:
                continue
            if self._steps.get(_content(term.arrays[field.name]), field.exponent) != field.exponent:
                return field.name
        return None

    def too_large(self, array: Array) -> None:
        """Note that these numbers are too large for one limb, so that they are told in two."""
        self._steps[_content(array)] = _TWO_LIMBS
        self._save()

    # -- rows and the folder -----------------------------------------------------------------------

    def _fresh(self, data: ClientData, stage: CensusStage) -> tuple[Array, Array, Array, Array]:
        """The class of each row by a stage, and its hash; which rows no total was about yet; and how many of
        these lie in which cells."""
        classes, weights = labels_from_note(stage.classes), data.own_weights
        new = np.flatnonzero((self._places(data) < 0) & (True if weights is None else weights > 0))
        # The hashes decide rows' folds; in one process, where nobody is hidden, they are those of plain runs.
        hashes = data.row_hashes() if self.folder is None else data.row_hashes(self.key.hex())
        codes = _codes(data, classes)
        own = np.zeros((1 if classes is None else len(classes), sum(DIVISIONS)))
        for count, start in STARTS.items():
            folds: Array = fold_numbers(hashes[new], count) if count > 1 else np.zeros_like(codes[new])
            np.add.at(own, (codes[new], start + folds), 1)
        return codes, hashes, new, own

    def _places(self, data: ClientData) -> Array:
        """The place of each row among those that took part, -1 where it is new."""
        known, digests = self.account.rows["digest"], self._digests(data)
        if not len(known):
            return np.full(len(digests), -1)
        place = np.minimum(np.searchsorted(known, digests), len(known) - 1)
        return np.where(known[place] == digests, place, -1)

    def _parts(self) -> tuple[dict[str, Array], dict[str, Any]]:
        kept = {name: getattr(self, name) for name in _KEPT}
        kept["_seen"] = sorted(self._seen)
        kept["accounts"] = [vars(self._now), vars(self.account)]
        return to_parts(kept, "an account")

    def _save(self) -> None:
        """Write the account down; what cannot be written is forgotten, as its answer is not sent."""
        if self.folder is None or not self.entering:
            return
        arrays, note = parts = self._parts()
        try:
            self._shelf.keep("cells", note, arrays)
        except BaseException:
            self._load(*self._written)
            raise
        self._written = parts

    def _load(self, arrays: dict[str, Array], note: dict[str, Any]) -> None:
        self._written = arrays, note
        kept = from_parts(arrays, note)
        vars(self).update({name: kept[name] for name in _KEPT})
        self._seen, self.classes = set(self._seen), labels_from_note(self._classes)
        now, following = (Account(**one) for one in kept["accounts"])
        self._now, self.account = now, now if following.history == now.history else following


def _codes(data: ClientData, classes: Array | None) -> Array:
    if classes is None:
        return np.zeros(len(data), dtype=np.int64)
    return encode_labels(data.own_labels, classes).astype(np.int64)


def _content(array: Array) -> str:
    plain = np.ascontiguousarray(array)
    return hashlib.sha256(repr(plain.shape).encode() + plain.tobytes()).hexdigest()[:32]


def check_method(chain: Chain) -> type:
    """The class of a run's method; refused, by name, where it needs each client's answer by itself."""
    key = chain.opening["method"]
    kind = registry.method_class(key)
    if getattr(kind, "gathers", False):
        raise DataError(
            f"method '{key}' gathers: its server needs every client's answer by itself, which secure sums "
            "hide. Choose a method that needs sums only ('fedsolve methods'), or train in the open."
        )
    return kind
