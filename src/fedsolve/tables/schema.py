"""What a row is: columns by name and kind, label and classes; or a backbone and its preprocessing.

A schema is agreed on before anything is sent, and it is part of the model. It turns a raw row into numbers by
itself: no number in it depends on the data that are encoded, so that every site encodes alike.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import cached_property, partial
from typing import Any, Literal, get_type_hints

from fedsolve import container
from fedsolve.arrays import Array, check_choice
from fedsolve.errors import DataError, did_you_mean, explained, naming
from fedsolve.labels import TASKS, Task, class_list, labels_from_note, labels_note
from fedsolve.parameters import known_are, parse_toml, typed

Kind = Literal["number", "category", "date", "text", "identifier", "unused"]

RULES: dict[str, tuple[str, ...]] = {
    "number": ("mean", "flag", "refuse"),
    "date": ("mean", "flag", "refuse"),
    "category": ("other", "flag", "refuse"),
    "text": ("empty", "refuse"),
    "identifier": ("ignore",),
    "unused": ("ignore",),
}
"""Allowed rules for missing values by kind of column; the first is the default."""

KEYS: dict[str, tuple[str, ...]] = {
    "number": ("unit", "missing", "reference", "scale", "bounds", "absent", "signs"),
    "date": ("unit", "missing", "reference", "scale", "format", "absent"),
    "category": ("unit", "missing", "categories"),
    "text": ("unit", "missing", "buckets", "backbone"),
    "identifier": (),
    "unused": (),
}
"""What is stated of a column besides its name and kind."""

LEFT_OUT = ("identifier", "unused")
"""Kinds of columns that do not become features."""

DAYS_A_YEAR = 365.25

NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
"""A number in a cell; no underscores, no infinity."""

MONEY = "$€£¥"
SIGNS = f"<>≤≥~{MONEY}%"
"""Signs that may stand around a number."""

_SIGNED = re.compile(rf"([<>≤≥~{MONEY}]*)\s*({NUMBER.pattern})\s*([%{MONEY}]?)")


def signed_number(text: str) -> tuple[float, str] | None:
    """The number in a cell and the signs around it; None where it is no number."""
    found = _SIGNED.fullmatch(text.strip())
    return None if found is None else (float(found[2]), found[1] + found[3])


@dataclass(frozen=True)
class Column:
    """One column of a table, by its name.

    kind:       what its cells are; an "unused" column is known and left out, and so is an "identifier",
                which stands beside predictions to tell whose they are.
    unit:       for people; sites must agree on it.
    categories: the values of a category in the order of their columns; all others are "other".
    missing:    the rule for a missing value. "mean": the mean over all sites. "flag": the same, and a column
                of 0 and 1 says so (of a category: a column of its own). "other": as an unknown category.
                "empty": as text without words. "refuse". Or one of the categories: it counts as this one.
    reference, scale: a value near which the numbers lie, and about how far they spread. Sums are taken of
                (x - reference) / scale, so that large numbers do not cancel; no result depends on them
                beyond rounding. Of a date, the reference is in days since 1970-01-01 and the feature is
                (days - reference) / scale.
    bounds:     the least and the greatest number; what lies beyond counts as the bound, in training and in
                prediction. Without them, sums show a number that is far larger than all others.
    buckets:    width of the hashed words of a text. backbone: what turns it into features instead.
    format:     of a date, as in strptime; ISO 8601 when None.
    absent:     what else stands for a missing number or date in this column, such as "?" or "-999".
    signs:      what may stand around a number and is left out: some of `SIGNS`. With %, every number has one.
    remark:     for people; in the file a comment.
    width:      how many features the column becomes. sentinels: the numbers that stand for a missing one.
    """

    name: str
    kind: Kind = "number"
    unit: str | None = None
    categories: tuple[str, ...] = ()
    missing: str = ""
    reference: float = 0.0
    scale: float = 0.0
    bounds: tuple[float, ...] = ()
    buckets: int = 64
    backbone: Extractor | None = None
    format: str | None = None
    absent: tuple[str, ...] = ()
    signs: str = ""
    remark: str = field(default="", compare=False)
    width: int = field(init=False, repr=False, compare=False)
    sentinels: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in RULES:
            raise DataError(f"column '{self.name}': unknown kind '{self.kind}'.{known_are(self.kind, RULES)}")
        if not self.missing:
            object.__setattr__(self, "missing", RULES[self.kind][0])
        if not self.scale:
            object.__setattr__(self, "scale", DAYS_A_YEAR if self.kind == "date" else 1.0)
        if isinstance(self.backbone, Mapping):
            object.__setattr__(self, "backbone", Extractor(**self.backbone))
        object.__setattr__(self, "bounds", tuple(map(float, self.bounds)))
        types = {"categories": tuple, "absent": tuple, "reference": float, "scale": float}
        for name, plain in types.items():
            object.__setattr__(self, name, plain(getattr(self, name)))
        made, problem = self.backbone, ""
        if self.missing not in (*RULES[self.kind], *self.categories):
            rules = ", ".join(RULES[self.kind]) + " or one of its categories" * (self.kind == "category")
            problem = f"missing = '{self.missing}' is no rule for a {self.kind}; choose among {rules}."
        elif not math.isfinite(self.reference) or not (math.isfinite(self.scale) and self.scale > 0):
            problem = f"reference must be finite and scale > 0; got {self.reference:g} and {self.scale:g}."
        elif self.bounds and not (
            len(self.bounds) == 2 and -math.inf < self.bounds[0] < self.bounds[1] < math.inf
        ):
            problem = f"bounds must be two numbers, the smaller one first; got {list(self.bounds)}."
        elif (self.kind == "category") != bool(self.categories):
            problem = "a category, and nothing else, needs a list of categories."
        elif len(set(self.categories)) != len(self.categories):
            problem = f"categories must differ; got {', '.join(map(repr, self.categories))}."
        elif not all(isinstance(category, str) for category in self.categories):
            problem = 'categories must be text; write "1" for the code 1.'
        elif not set(self.signs) <= set(SIGNS) or (self.signs and self.kind != "number"):
            problem = f"signs are some of {SIGNS}, around numbers; got {self.signs!r}."
        elif made is not None and not (
            self.kind == "text"
            and isinstance(made.address, str)
            and type(made.width) is int
            and made.width > 0
        ):
            problem = f"a backbone is for text, and has an address and a width of at least 1; got {made}."
        elif type(self.buckets) is not int or self.buckets < 1:
            problem = f"buckets must be a whole number, at least 1; got {self.buckets!r}."
        if problem:
            raise DataError(f"column '{self.name}': {problem}")
        widths = {"number": 1, "date": 1, "category": len(self.categories) + 1, "text": self.buckets}
        width = widths.get(self.kind, 0) if self.backbone is None else self.backbone.width
        object.__setattr__(self, "width", width + (self.missing == "flag"))
        numbers = [float(text) for text in self.absent if self.kind == "number" and NUMBER.fullmatch(text)]
        object.__setattr__(self, "sentinels", tuple(numbers))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the features that the column becomes."""
        flag = (f"{self.name}=(missing)",) if self.missing == "flag" else ()
        if self.kind in ("number", "date"):
            return (self.name, *flag)
        if self.kind == "category":
            known = tuple(f"{self.name}={category}" for category in self.categories)
            return (*known, f"{self.name}=(other)", *flag)
        return tuple(f"{self.name}#{number}" for number in range(self.width))

    def day(self, number: float) -> str | None:
        """The date that a number of a date column means; None for NaN."""
        if math.isnan(number):
            return None
        ordinal = _EPOCH.toordinal() + round(self.reference + self.scale * number)
        return date.fromordinal(min(max(ordinal, date.min.toordinal()), date.max.toordinal())).isoformat()

    @property
    def counted(self) -> str:
        """The unit and the origin of a date column's numbers, such as years since a day."""
        spans = {DAYS_A_YEAR: "years", 1.0: "days"}
        return f"{spans.get(self.scale, f'units of {self.scale:g} days')} since {self.day(0)}"

    def to_note(self, elsewhere: bool = False) -> dict[str, Any]:
        """The column as JSON values; only what its kind uses. `elsewhere`: without a backbone's address."""
        note: dict[str, Any] = {"name": self.name, "kind": self.kind}
        for key in KEYS[self.kind]:
            value = getattr(self, key)
            if isinstance(value, Extractor):
                note[key] = value.to_note(elsewhere)
                del note["buckets"]
            elif key == "format" or value not in (None, (), ""):
                note[key] = list(value) if isinstance(value, tuple) else value
        return note


@dataclass(frozen=True)
class Extractor:
    """Where features of images or text come from: a backbone's preprocessing, and its weights by digest.

    address: how the backbone is named where the model was made; its files may lie elsewhere, so that this is
             no part of what must agree. Nothing for features that a dataset of images came with.
    weights: SHA-256 of the weights; nothing where there are none.
    recipe:  what else names the function that is computed: its kind, version, output and the like.
    """

    address: str = field(compare=False)
    preprocessing: Mapping[str, Any]
    weights: str
    width: int
    recipe: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, address: str, identity: Mapping[str, Any], width: int) -> Extractor:
        """The backbone of this identity (`Backbone.identity`)."""
        # Devices round differently, which is no reason to refuse a model elsewhere.
        parts = ("preprocessing", "weights", "device")
        recipe = {name: value for name, value in identity.items() if name not in parts}
        return cls(
            address, dict(identity.get("preprocessing", {})), str(identity.get("weights", "")), width, recipe
        )

    @property
    def name(self) -> str:
        """What to call it in a message."""
        return self.address or str(self.recipe.get("name", "unknown"))

    def differences(self, other: Extractor) -> list[str]:
        """Differences from `other`, one phrase each."""
        if self.recipe.get("name") != other.recipe.get("name"):
            return [f"the backbone is {self.name}, there {other.name}"]
        phrases = []
        for what, part in (("backbone", "recipe"), ("preprocessing", "preprocessing")):
            mine, theirs = getattr(self, part), getattr(other, part)
            phrases += [
                f"the {what}'s {key} is {mine.get(key)!r}, there {theirs.get(key)!r}"
                for key in sorted({*mine, *theirs})
                if mine.get(key) != theirs.get(key)
            ]
        if self.weights != other.weights:
            phrases.append(
                f"the weights of {self.name} have the digest {self.weights[:12]}..., there "
                f"{other.weights[:12]}..."
            )
        if not phrases and self.width != other.width:
            phrases.append(f"a row has {self.width} features, there {other.width}")
        return phrases

    def to_note(self, elsewhere: bool = False) -> dict[str, Any]:
        """The extractor as JSON values; `elsewhere` leaves out its address."""
        note = dataclasses.asdict(self)
        return {name: value for name, value in note.items() if not (elsewhere and name == "address")}


@dataclass(frozen=True)
class Schema:
    """What a row is: the columns of a table, or the backbone that made features of images.

    columns: in the order of their features; a file may have them in any order.
    label:   the column of the labels. classes: the labels that there are; empty where none are declared.
    client:  the column that names who owns a row.
    weight:  the column that says how much a row counts in training, a number of at least 0.
    task:    "regression" where the labels are numbers to predict; None where they are classes, or may be.
    labels:  the columns of several labels a row, each 0 or 1, instead of one label.

    used: the columns that become features. width: how many features a row has once it is encoded.
    label_columns: the label column, or the columns of several labels. class_array: the classes as an array in
    the type of the labels; None where none are declared.
    """

    columns: tuple[Column, ...] = ()
    label: str | None = None
    classes: tuple[Any, ...] = ()
    client: str | None = None
    extractor: Extractor | None = None
    weight: str | None = None
    task: Task | None = None
    labels: tuple[str, ...] = ()
    used: tuple[Column, ...] = field(init=False, repr=False, compare=False)
    width: int = field(init=False, repr=False, compare=False)
    label_columns: tuple[str, ...] = field(init=False, repr=False, compare=False)
    class_array: Array | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        object.__setattr__(self, "labels", tuple(self.labels))
        if self.labels:
            if self.label is not None or self.classes:
                raise DataError("a schema has labels = [...], or one label with its classes, not both.")
            object.__setattr__(self, "task", "regression")
        if self.task is not None:
            check_choice("task", self.task, TASKS)
        if self.classes and self.task == "regression":
            raise DataError("a schema has classes, or task = 'regression'; leave out one of them.")
        classes = tuple(class_list(self.classes).tolist()) if self.classes else ()
        object.__setattr__(self, "classes", classes)
        # Of the plain values: however they were typed, the schema has one digest.
        object.__setattr__(self, "class_array", class_list(classes) if classes else None)
        if bool(self.columns) == (self.extractor is not None):
            raise DataError("a schema describes the columns of a table, or the features of images.")
        label_columns = self.labels or (() if self.label is None else (self.label,))
        object.__setattr__(self, "label_columns", label_columns)
        names = [column.name for column in self.columns] + [
            name for name in (*label_columns, self.client, self.weight) if name
        ]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DataError(
                f"the schema names {', '.join(map(repr, twice))} more than once; a name says one thing."
            )
        used = tuple(column for column in self.columns if column.kind not in LEFT_OUT)
        if self.columns and not used:
            raise DataError("the schema uses no column: all are of the kind 'unused' or 'identifier'.")
        width = sum(column.width for column in used) if self.extractor is None else self.extractor.width
        object.__setattr__(self, "used", used)
        object.__setattr__(self, "width", width)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the encoded features, in order."""
        if self.extractor is not None:
            return tuple(f"feature {number}" for number in range(self.extractor.width))
        return tuple(name for column in self.used for name in column.names)

    @property
    def identifiers(self) -> tuple[str, ...]:
        """The columns that identify a row."""
        return tuple(column.name for column in self.columns if column.kind == "identifier")

    @property
    def backbones(self) -> dict[str, Extractor]:
        """The backbones of text columns, by column."""
        return {column.name: column.backbone for column in self.used if column.backbone is not None}

    def moved(self, address: str | None) -> Schema:
        """The schema with another address for the backbone of its text columns; unchanged for None."""
        if address is None:
            return self
        if not self.backbones:
            raise DataError("the schema is of a table without text by a backbone; leave out --backbone.")
        columns = {column.name: column for column in self.columns}
        for name, backbone in self.backbones.items():
            there = dataclasses.replace(backbone, address=address)
            columns[name] = dataclasses.replace(columns[name], backbone=there)
        return dataclasses.replace(self, columns=tuple(columns.values()))

    @classmethod
    def of_numbers(
        cls,
        names: Iterable[str],
        classes: Array | None = None,
        label: str | None = None,
        labels: tuple[str, ...] = (),
    ) -> Schema | None:
        """The schema of plain numbers in columns with these names; None if names are missing or repeated.

        classes: of the labels; None for a regression.
        """
        names = [str(name) for name in names]
        if not names or len(set(names)) < len(names):
            return None
        columns = tuple(Column(name, missing="refuse") for name in names)
        known = () if classes is None else tuple(classes.tolist())
        task: Task | None = "regression" if classes is None else None
        labels = () if {*labels} & {*names} else labels
        return cls(columns, None if label in names else label, known, task=task, labels=labels)

    def places(self, *kinds: str) -> list[tuple[int, Column]]:
        """The position of the first feature of every column of these kinds."""
        found, place = [], 0
        for column in self.used:
            if column.kind in kinds:
                found.append((place, column))
            place += column.width
        return found

    # -- agreement ---------------------------------------------------------------------------------

    def to_note(self) -> dict[str, Any]:
        """The schema as JSON values, for the opening of a run and the model file."""
        return {
            "columns": [column.to_note() for column in self.columns],
            "label": self.label,
            "classes": labels_note(self.class_array),
            "client": self.client,
            "extractor": None if self.extractor is None else self.extractor.to_note(),
            **({} if self.weight is None else {"weight": self.weight}),
            **({} if self.task is None else {"task": self.task}),
            **({"labels": list(self.labels)} if self.labels else {}),
        }

    @classmethod
    def from_note(cls, note: Mapping[str, Any]) -> Schema:
        """The schema that `to_note` described."""
        classes, extractor = labels_from_note(note["classes"]), note["extractor"]
        made: dict[str, Any] = {
            "columns": tuple(Column(**column) for column in note["columns"]),
            "classes": () if classes is None else tuple(classes.tolist()),
            "extractor": None if extractor is None else Extractor(**extractor),
        }
        return cls(**{**note, **made})

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what sites must agree on; unused columns and the owner column do not count."""
        note = self.to_note() | {"client": None}
        note["columns"] = [column.to_note(elsewhere=True) for column in self.used]
        note["extractor"] = None if self.extractor is None else self.extractor.to_note(elsewhere=True)
        return container.digest(note, {})

    def differences(self, other: Schema) -> list[str]:
        """Differences from `other`, one phrase each; empty if the digests agree."""
        if self.digest == other.digest:
            return []
        mine, theirs = ({column.name: column for column in schema.used} for schema in (self, other))
        phrases = [f"column '{name}' is missing" for name in theirs if name not in mine]
        phrases += [f"column '{name}' is not known there" for name in mine if name not in theirs]
        for name in mine.keys() & theirs.keys():
            ours, others = (columns[name].to_note(elsewhere=True) for columns in (mine, theirs))
            own, other_one = mine[name].backbone, theirs[name].backbone
            if own is not None and other_one is not None:
                phrases += [f"column '{name}': {phrase}" for phrase in own.differences(other_one)]
                ours["backbone"] = others["backbone"]
            phrases += [
                f"column '{name}' has {key} {ours.get(key)!r}, there {others.get(key)!r}"
                for key in sorted(ours.keys() | others.keys())
                if ours.get(key) != others.get(key)
            ]
        if self.extractor is not None and other.extractor is not None:
            phrases += self.extractor.differences(other.extractor)
        elif self.extractor is not None or other.extractor is not None:
            rows = ("features of images", "columns of a table")
            phrases.append("its rows are {}, there {}".format(*(rows if self.extractor else rows[::-1])))
        for key in ("label", "labels", "classes", "weight", "task"):
            if getattr(self, key) != getattr(other, key):
                phrases.append(f"{key} is {getattr(self, key)!r}, there {getattr(other, key)!r}")
        return sorted(phrases) or ["the columns are in another order"]

    def check_columns(
        self,
        names: Iterable[str],
        labelled: bool = False,
        extra: Literal["refuse", "ignore"] = "refuse",
        weighted: bool = False,
    ) -> None:
        """Refuse a table whose columns do not fit and name them all. Column order does not matter.

        labelled: whether the label column must be there; weighted: whether that of weights must be.
        extra: what to do about columns of other names.
        """
        there = [str(name) for name in names]
        wanted = [column.name for column in self.used]
        wanted += [name for name in self.label_columns if labelled]
        wanted += [self.weight] if weighted and self.weight is not None else []
        known = {column.name for column in self.columns} | {*self.label_columns, self.client, self.weight}
        strange = [name for name in there if name not in known]
        problems, remedies = [], []
        twice = sorted({name for name in there if there.count(name) > 1})
        if twice:
            problems.append(f"more than one column is called {', '.join(map(repr, twice))}")
            remedies.append("Rename columns that have one name.")
        for name in (absent := [name for name in wanted if name not in there]):
            hint = did_you_mean(name, strange).strip().replace("Did", "did")
            problems.append(f"column '{name}' is missing{f' ({hint})' * bool(hint)}")
        if absent and {*absent} <= {*self.label_columns}:
            remedies.append("Rename the column that holds the truth; 'fedsolve predict' needs none.")
        elif absent:
            remedies.append(
                "Rename the column that holds what is missing, or add it: its cells may be empty where the "
                "schema says what becomes of missing values."
            )
        if extra == "refuse" and strange:
            problems += [f"column '{name}' is not in the schema" for name in strange]
            remedies.append(
                'A column that is not to be used has kind = "unused" in the schema; or, with a trained '
                "model, --drop."
            )
        if problems:
            raise DataError(f"the columns do not fit the schema: {'; '.join(problems)}. {' '.join(remedies)}")


# -- as a TOML file, for people to review -------------------------------------------------------------

_EPOCH = date(1970, 1, 1)
_WIDTH = 100

_HEAD = """\
# What a row is. Review it, then hand the same file to all sites; it becomes part of the model.
#
# kind:      "number", "category", "date", "text", "unused" (known, and left out), or "identifier" (left out
#            too, and written beside the predictions).
# missing:   what an empty cell becomes. "mean": the mean over all sites; "flag": the same, and a column of 0
#            and 1 says so (of a category: a column of its own); "other": as an unknown category; "empty": as
#            text without words; "refuse": the file is refused; one of the categories: it counts as this one.
# reference, scale: about where the values lie and how far they spread, rounded. They only keep large numbers
#            from cancelling in sums; results do not depend on them. Of a date, its zero, and days per unit.
# bounds:    the least and the greatest number, as in [0, 120]; what lies beyond counts as the bound. Without
#            them, sums over all sites show a number that is far larger than all others.
# absent:    what else stands for an empty cell in this column, such as "?" or "-999". signs: what may stand
#            around a number and is left out, such as "<" or "%".
# task:      "regression" where the labels are numbers to predict; classes are listed under classes.
# labels:    instead of label, the columns of several labels a row, each 0 or 1: ["edema", "effusion"].
# backbone:  what turns a text into features, by address and digest of its weights; without one, its words are
#            hashed into so many buckets.
# unit:      for people; sites must agree on it. A remark after # says what was noticed in the file.
"""


def to_toml(schema: Schema) -> str:
    """The schema as a file, remarks as comments."""
    lines = [_HEAD]
    for key in ("label", "client", "weight", "task", "classes", "labels"):
        value = getattr(schema, key)
        if value not in (None, ()) and not (key == "task" and schema.labels):
            lines.append(f"{key} = {_value(value)}")
    if schema.extractor is not None:
        lines += ["", "[extractor]", *_described(schema.extractor)]
    for column in schema.columns:
        remark = f"  # {' '.join(column.remark.split())}" if column.remark else ""
        lines += ["", f"[columns.{_key(column.name)}]{remark}", f"kind = {_text(column.kind)}"]
        for key in KEYS[column.kind]:
            value = getattr(column, key)
            if isinstance(value, Extractor):
                lines += ["", f"[columns.{_key(column.name)}.backbone]", *_described(value)]
            elif key == "reference" and column.kind == "date" and value.is_integer():
                lines.append(f"reference = {(_EPOCH + timedelta(days=value)).isoformat()}")
            elif value not in (None, (), "") and not (key == "buckets" and column.backbone):
                lines.append(f"{key} = {_value(value)}")
    return "\n".join(lines) + "\n"


def _described(extractor: Extractor) -> list[str]:
    lines = [f"{key} = {_value(getattr(extractor, key))}" for key in ("address", "weights", "width")]
    packed = {key: container.canonical_json(getattr(extractor, key)) for key in ("recipe", "preprocessing")}
    return lines + [f"{key} = {_text(value)}" for key, value in packed.items()]


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def _text(value: Any) -> str:
    # JSON's escapes are TOML's, except that TOML also wants this one escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if isinstance(value, list | tuple):
        parts = [repr(part) if isinstance(part, float) else _value(part) for part in value]
        line = f"[{', '.join(parts)}]"
        return line if len(line) <= _WIDTH else "[\n" + "".join(f"  {part},\n" for part in parts) + "]"
    return _text(value)


def read_schema(path: str | os.PathLike[str]) -> Schema:
    """The schema in a file: TOML, or the JSON in which a site keeps the one that was agreed."""
    text = container.read(path)
    with naming(path):
        if text.lstrip().startswith(b"{"):
            with explained("the schema cannot be used"):
                return Schema.from_note(json.loads(text))
        return from_toml(text)


def write_schema(schema: Schema, path: str | os.PathLike[str]) -> None:
    """Write the schema to a file; one that is there stays as FILE.previous."""
    container.write_atomically(path, to_toml(schema).encode(), previous_kept=True)


_TOP = dict.fromkeys(("label", "client", "weight", "task"), str) | {
    "classes": tuple[Any, ...],
    "labels": tuple[str, ...],
}


def from_toml(text: str | bytes) -> Schema:
    """The schema in a TOML text. All mistakes are reported at once."""
    note = parse_toml(text.encode() if isinstance(text, str) else text, "the schema")
    columns, problems = [], []

    def look(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except DataError as problem:
            problems.append(str(problem))

    known = {**_TOP, "columns": Mapping[str, Any], "extractor": dict}
    top = look(lambda: typed(note, "the schema", known))
    listed = note.get("columns")
    for name, keys in (listed if isinstance(listed, dict) else {}).items():
        columns.append(look(partial(_column, name, keys)))
    if problems:
        raise DataError(" ".join(problems))
    extractor = _extractor(top["extractor"]) if "extractor" in top else None
    return Schema(tuple(columns), extractor=extractor, **{name: top[name] for name in _TOP if name in top})


def _column(name: str, keys: Any) -> Column:
    where = f"column '{name}'"
    if not isinstance(keys, dict):
        raise DataError(f"{where} must be a table: [columns.{_key(name)}].")
    kind = keys.get("kind", "number")
    if not isinstance(kind, str) or kind not in RULES:
        raise DataError(f"{where}: unknown kind {kind!r}.{known_are(str(kind), RULES)}")
    # A column left out may keep what it had, so that one word leaves it out and takes it back.
    left_out = kind in LEFT_OUT
    known = {key for keys in KEYS.values() for key in keys} if left_out else KEYS[kind]
    hints = get_type_hints(Column)
    if isinstance(keys.get("reference"), date):
        since = keys["reference"]
        since = since.date() if hasattr(since, "date") else since
        keys = keys | {"reference": (since - _EPOCH).days}
    backbone = keys.get("backbone")
    if isinstance(backbone, str):
        raise DataError(
            f"{where}: the schema must say which weights {backbone} has. Write it with 'fedsolve schema DATA "
            f"--text-column {name} --backbone {backbone}'."
        )
    hints |= {"backbone": dict}
    given = typed(keys, where, {key: hints[key] for key in ("kind", *known)})
    if backbone is not None:
        given["backbone"] = _extractor(backbone, f"{where}, backbone")
    return Column(name, kind) if left_out else Column(name, **given)  # type: ignore[arg-type]


def _extractor(keys: Mapping[str, Any], where: str = "[extractor]") -> Extractor:
    parts = {"address": str, "preprocessing": str, "recipe": str, "weights": str, "width": int}
    given = typed(keys, where, parts, parts)
    try:
        packed = {name: json.loads(given[name]) for name in ("preprocessing", "recipe")}
    except ValueError as problem:
        raise DataError(f"{where}: preprocessing and recipe must be JSON ({problem}).") from problem
    return Extractor(**given | packed)
