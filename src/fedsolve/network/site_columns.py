"""What a site says about the columns of its table, and how the columns of two sites differ.

Sums of two sites go together only where their columns are the same, in the same order. A site whose rows come
from a table sends the names of its columns, so that the server can tell.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from fedsolve.arrays import Array
from fedsolve.container import canonical_json
from fedsolve.errors import did_you_mean
from fedsolve.federation.cohort import plain
from fedsolve.network.parcels import Note
from fedsolve.tables.schema import Extractor, Schema

_LONGEST = 1 << 18
"""Characters of names that are sent; of longer ones the digest says whether they agree."""
_SHOWN = 8


def columns_digest(names: Sequence[str]) -> str:
    return hashlib.sha256(canonical_json(list(names)).encode()).hexdigest()


def columns_note(columns: Schema | None) -> Note | None:
    """What is sent about these columns; nothing where there are no names."""
    if columns is None:
        return None
    if columns.extractor is not None:
        digest = columns_digest([canonical_json(columns.extractor.to_note(elsewhere=True))])
        return {"digest": digest, "names": None, "label": None, "extractor": columns.extractor.to_note()}
    names = [column.name for column in columns.used]
    return {
        "digest": columns_digest(names),
        "names": names if len(canonical_json(names)) <= _LONGEST else None,
        "label": columns.label,
    }


def strange_columns(note: Any, features: int) -> str | None:
    """Why this cannot be what `columns_note` made for rows of so many features."""
    if note is None:
        return None
    if not isinstance(note, dict) or type(note.get("digest")) is not str:
        return f"it describes its columns as {plain(note)}."
    names, label, backbone = (note.get(part) for part in ("names", "label", "extractor"))
    if backbone is not None:
        try:
            extractor = Extractor(**backbone)
            names, kinds = [canonical_json(extractor.to_note(elsewhere=True))], (str, str, dict, dict)
            parts = extractor.address, extractor.weights, extractor.recipe, extractor.preprocessing
            sound = len(names[0]) <= _LONGEST and all(map(isinstance, parts, kinds))
        except (TypeError, ValueError):
            sound = False
        if not sound:
            return f"it describes its backbone as {plain(backbone)}."
        if extractor.width != features:
            return f"its backbone gives {plain(extractor.width)} features and it has {features}."
    elif not isinstance(label, str | None):
        return f"its label column is called {plain(label)}."
    elif names is None:
        return None
    elif not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return f"the names of its columns are {plain(names)}."
    elif len(names) != features:
        return f"it names {len(names)} columns and has {features} features."
    if columns_digest(names or ()) != note["digest"]:
        return "the digest of its columns is not that of their description."
    return None


def columns_apart(name: str, mine: Note, other: str, theirs: Note) -> str | None:
    """How the columns of site `name` differ from those of `other`, and what to do; None where they agree."""
    if mine["digest"] == theirs["digest"]:
        return None
    backbones = [Extractor(**note["extractor"]) for note in (mine, theirs) if note.get("extractor")]
    if len(backbones) == 1:
        return f"of '{name}' and {other}, one has features of images and one has columns of a table."
    if backbones:
        told = plain("; ".join(backbones[0].differences(backbones[1])))
        return (
            f"'{name}' does not use the backbone of {other}: {told}. Use the same backbone, weights and "
            "preprocessing at all sites, or give all of them a schema ('fedsolve schema folder:PATH')."
        )
    schema = "or use a schema (--schema at the server and at all sites), which finds columns by name"
    if mine["names"] is None or theirs["names"] is None:
        return f"the columns of '{name}' are not those of {other}. Use the same, in the same order, {schema}."
    own, wanted = mine["names"], theirs["names"]
    missing = [column for column in wanted if column not in own]
    added = [column for column in own if column not in wanted]
    if not missing and not added and sorted(own) == sorted(wanted):
        place = next(index for index, pair in enumerate(zip(own, wanted, strict=True)) if pair[0] != pair[1])
        return (
            f"the columns of '{name}' are those of {other} in another order: feature {place} is "
            f"'{plain(own[place])}', there '{plain(wanted[place])}'. Put them into the same order, {schema}."
        )
    phrases = []
    for column in missing[:_SHOWN]:
        hint = did_you_mean(column, added).strip().replace("Did", "did")
        phrases.append(f"column '{plain(column)}' is missing{f' ({plain(hint)})' * bool(hint)}")
    phrases += [f"column '{plain(column)}' is not known there" for column in added[:_SHOWN]]
    more = len(missing) + len(added) - len(phrases)
    if more:
        phrases.append(f"{more} more")
    if not phrases:
        phrases = ["a name stands more often than there"]
    return (
        f"the columns of '{name}' are not those of {other}: {'; '.join(phrases)}. Rename them, or leave out "
        "(--drop) what not all sites have."
    )


def numbers_schema(note: Note | None, classes: Array | None) -> Schema | None:
    """The schema of plain numbers with these columns, or of features of images; None where none can tell."""
    if note is None:
        return None
    if note.get("extractor") is not None:
        known = () if classes is None else tuple(classes.tolist())
        return Schema(classes=known, extractor=Extractor(**note["extractor"]))
    return Schema.of_numbers(note["names"] or (), classes, note["label"])
