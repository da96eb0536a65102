"""Whether a method keeps the laws of fedsolve: `check_method`, for methods what `check_estimator` is for
estimators.

>>> from fedsolve.testing import check_method
>>> check_method(MyMethod)            # doctest: +SKIP
>>> check_method(MyMethod(width=64))  # doctest: +SKIP

Every check trains on a few dozen rows made here and raises `LawBroken`, which names the check, what was seen
and what to do.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve import registry
from fedsolve.arrays import Array
from fedsolve.errors import FedsolveError
from fedsolve.federation.encoding import decode_request, decode_term, encode_request, encode_term
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.messages import Chain, Request, Term, Total
from fedsolve.federation.method import Method
from fedsolve.federation.participant import ClientData, Participant
from fedsolve.federation.recipe import Recipe
from fedsolve.model import Model, load_model

ROWS, FEATURES, CLASSES = 72, 6, 3
_ROUNDING = 1e-12
"""How far scores may differ, as a share of the largest, where only the order of a sum changes."""

Clients = Mapping[str, Array]
"""Which rows each client owns, by its name."""

Asking = Callable[[Participant, Request], Term]


class LawBroken(AssertionError):
    """A method that does not keep a law: `check` is the name of the check that found it."""

    def __init__(self, check: str, method: Method[Any], what: str) -> None:
        super().__init__(f"{type(method).__name__} fails the check '{check}': {what}")
        self.check = check


class _Broken(AssertionError):
    """What a check saw that the law forbids."""


def check_method(method: type[Method[Any]] | Method[Any]) -> list[str]:
    """Hold a method to every law; the names of the checks that it passed.

    method: an instance, or a class, whose `trial()` is taken.
    """
    instance = method.trial() if inspect.isclass(method) else method
    passed = []
    for name, check in CHECKS.items():
        if name in _OF_PARTITIONS and instance.laws.partition is None:
            continue
        if name == "empty clients" and not instance.laws.empty:
            continue
        try:
            check(instance)
        except Exception as problem:
            what = str(problem) if isinstance(problem, _Broken) else f"{type(problem).__name__}: {problem}"
            raise LawBroken(name, instance, what) from problem
        passed.append(name)
    return passed


# -- rows and federations --------------------------------------------------------------------------


def _rows() -> tuple[Array, Array]:
    """Features and labels of classes that overlap: (ROWS, FEATURES) and (ROWS,)."""
    random = np.random.Generator(np.random.Philox(7))
    labels = np.arange(ROWS) % CLASSES
    centres = random.normal(size=(CLASSES, FEATURES))
    return centres[labels] + random.normal(size=(ROWS, FEATURES)), labels


def _federation(clients: Clients, workers: int = 1, ask: Asking | None = None) -> LocalFederation:
    """ask: how each client is asked, one after the other."""
    features, labels = _rows()
    participants = [Participant(name, ClientData(features, labels, rows)) for name, rows in clients.items()]
    if ask is None:
        return LocalFederation(participants, classes=range(CLASSES), workers=workers)
    asked = _OneByOne(participants, classes=range(CLASSES))
    asked.ask = ask
    return asked


class _OneByOne(LocalFederation):
    """A local federation that asks one client after the other."""

    ask: Asking

    def exchange(self, request: Request, chain: Chain) -> Total:
        """The total of what the clients of the request's cohort answer; each is sent the whole model."""
        term, empty = Term(), []
        for participant in self.participants:
            if participant.name in request.cohort:
                term.add(self.ask(participant, request.starting_at(0, chain)))
                empty += [participant.name] if len(participant) == 0 else []
        term.mirror()
        return Total(term, tuple(sorted(request.cohort)), empty=tuple(empty))


def _answer(participant: Participant, request: Request) -> Term:
    term = participant.answer(request)
    assert isinstance(term, Term)
    return term


def _dealt(clients: int) -> dict[str, Array]:
    """Rows dealt one by one, so that every client sees every class."""
    owners = np.arange(ROWS) // CLASSES % clients  # blocks of CLASSES rows hold one of each class
    return {f"client-{client:02d}": np.flatnonzero(owners == client) for client in range(clients)}


def _by_class(clients: int) -> dict[str, Array]:
    """Rows sorted by class and cut: clients that see one or two classes."""
    order = np.argsort(np.arange(ROWS) % CLASSES, kind="stable")
    return {f"client-{client:02d}": rows for client, rows in enumerate(np.array_split(order, clients))}


def _scores(method: Method[Any], federation: Any) -> Array:
    return _of(method.fit(federation))


def _of(model: Model) -> Array:
    """What a model says of the rows; of one that only clients predict with, the arrays that make it."""
    if model.predicts:
        return model.decision_function(_rows()[0])
    return np.concatenate([np.ravel(array) for _, array in sorted(model.arrays().items())])


def _compare(scores: Mapping[str, Array], tolerance: float) -> None:
    """Refuse scores that differ from the first ones by more than `tolerance` times their largest."""
    (first, expected), *others = scores.items()
    if not np.all(np.isfinite(expected)):
        raise _Broken(f"with {first} the scores contain NaN or infinite values.")
    for name, seen in others:
        apart = np.max(np.abs(seen - expected)) / max(np.max(np.abs(expected)), 1e-300)
        if not apart <= tolerance:
            allowed = "no difference at all" if tolerance == 0 else f"{tolerance:g}"
            raise _Broken(
                f"scores with {name} differ from those with {first} by {apart:.2g} of the largest; "
                f"allowed is {allowed}."
            )


# -- the checks ------------------------------------------------------------------------------------


def _declaration(method: Method[Any]) -> None:
    """Parameters are a frozen dataclass, pass through JSON, and the key finds the class again."""
    kind = type(method)
    if not (dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen):
        raise _Broken("a method is a frozen dataclass: @dataclass(frozen=True).")
    again = kind(**json.loads(json.dumps(method.parameters())))
    if again != method:
        raise _Broken(f"from its parameters as JSON comes {again!r}, not {method!r}.")
    if registry.method_class(kind.key) is not kind:
        raise _Broken(f"its key '{kind.key}' belongs to {registry.method_class(kind.key)}.")


def _of_partitions(divisions: Mapping[str, Clients]) -> Callable[[Method[Any]], None]:
    """The check that the same rows give the same model, whoever owns them and in whatever order."""

    def check(method: Method[Any]) -> None:
        scores = {name: _scores(method, _federation(clients)) for name, clients in divisions.items()}
        _compare(scores, method.laws.partition or 0.0)

    return check


def _workers(method: Method[Any]) -> None:
    """The bits do not depend on how many clients are computed at the same time."""
    scores = {
        f"workers={count}": _scores(method, _federation(_dealt(5), workers=count)) for count in (1, 2, 3)
    }
    _compare(scores, 0.0)


def _empty_clients(method: Method[Any]) -> None:
    """Clients without rows are named, and change nothing."""
    nobody = np.zeros(0, dtype=np.intp)
    federation = _federation({**_dealt(3), "nobody": nobody})
    model = method.fit(federation)
    if not any("nobody" in record.empty for record in model.history):
        raise _Broken("the history does not name the client without rows.")
    scores = {"all clients": _scores(method, _federation(_dealt(3))), "an empty one more": _of(model)}
    _compare(scores, _ROUNDING)


def _repeat(method: Method[Any]) -> None:
    """The same request gives the same term, bit for bit."""

    def ask(participant: Participant, request: Request) -> Term:
        first, second = (_answer(participant, request) for _ in range(2))
        for name, array in first.arrays.items():
            if not np.array_equal(array, second.arrays.get(name, np.nan)):
                raise _Broken(f"'{participant.name}' answered the same request with another '{name}'.")
        return second

    method.fit(_federation(_dealt(3), ask=ask))


def _resume(method: Method[Any]) -> None:
    """A run that is stored and taken up again after every exchange gives the same bits."""
    whole = _scores(method, _federation(_dealt(3)))
    federation = _federation(_dealt(3))
    run = Recipe(method).start(federation.describe())
    while (request := run.request(federation.clients)) is not None:
        run.absorb(federation.exchange(request, run.chain))
        if len(run.history) > 2 * run.exchanges + 10:
            raise _Broken("after a resume it asks again and again; something is not stored.")
        stored = run.to_bytes()
        run = Recipe(method).start(federation.describe())
        run.restore(stored, "of check_method")
    _compare({"one go": whole, "a resume after every exchange": _of(run.model())}, 0.0)


def _encoding(method: Method[Any]) -> None:
    """Requests and terms that went through bytes give the same bits."""

    def ask(participant: Participant, request: Request) -> Term:
        term = decode_term(encode_term(_answer(participant, decode_request(encode_request(request)))))
        assert isinstance(term, Term)
        return term

    scores = {
        "values as they are": _scores(method, _federation(_dealt(3))),
        "everything encoded and decoded": _scores(method, _federation(_dealt(3), ask=ask)),
    }
    _compare(scores, 0.0)


def _files(method: Method[Any]) -> None:
    """A model that was saved and loaded says the same, and saves to the same bytes."""
    model = method.fit(_federation(_dealt(3)))
    with tempfile.TemporaryDirectory() as folder:
        path, again = Path(folder, "model.safetensors"), Path(folder, "again.safetensors")
        model.save(path)
        loaded = load_model(path, allow_methods=[method.key, model.family])
        loaded.save(again)
        if path.read_bytes() != again.read_bytes():
            raise _Broken("a loaded model saves to other bytes than it was loaded from.")
    _compare({"the model": _of(model), "the model from its file": _of(loaded)}, 0.0)


def _bad_input(method: Method[Any]) -> None:
    """No rows at all are refused, one class only is refused or gives numbers, no parameter takes anything."""
    nobody = np.zeros(0, dtype=np.intp)
    with suppress(FedsolveError):
        method.fit(_federation({"a": nobody, "b": nobody}))
        raise _Broken("no rows at all give a model; refuse them with a DataError.")
    one_class = np.flatnonzero(np.arange(ROWS) % CLASSES == 0)
    with suppress(FedsolveError):
        scores = _scores(method, _federation({"a": one_class[:9], "b": one_class[9:]}))
        if not np.all(np.isfinite(scores)):
            raise _Broken("rows of one class give NaN or infinite scores; refuse them.")
    for field in dataclasses.fields(type(method)):  # type: ignore[arg-type]
        with suppress(FedsolveError):
            type(method)(**{**method.parameters(), field.name: object()})
            raise _Broken(f"the parameter '{field.name}' takes any value; check it.")


def _gathers(method: Method[Any]) -> None:
    """Only a method that declares it sends arrays under a client's own name."""
    own: list[str] = []

    def ask(participant: Participant, request: Request) -> Term:
        term = _answer(participant, request)
        own.extend(name for name in term.arrays if name.endswith(f"@{participant.name}"))
        return term

    method.fit(_federation(_dealt(3), ask=ask))
    if own and not method.gathers:
        raise _Broken(
            f"it sends {own[0]!r}, which is no addend of a sum, and does not declare gathers = True."
        )


def _cells(method: Method[Any]) -> None:
    """What the first answer tells is about whole classes: measured, by leaving rows out one at a time."""
    features, labels = _rows()
    run = Recipe(method).start(_federation({"one": np.arange(ROWS)}).describe())
    request = run.request(("one",))
    if request is None:
        return
    asked = request.starting_at(0, run.chain)

    def told(rows: Array) -> dict[str, Array]:
        term = _answer(Participant("one", ClientData(features, labels, rows)), asked)
        total = Total(term, ("one",))
        arrays = {name: total[name] for name in term.arrays}
        columns = {
            f"column {place} of {name}": array[:, place]
            for name, array in arrays.items()
            if array.ndim == 2 and name not in term.symmetric and array.shape[1] <= CLASSES
            for place in range(array.shape[1])
        }
        return {**arrays, **columns}

    before = told(np.arange(ROWS))
    for label in range(CLASSES):
        mine = np.flatnonzero(labels == label)[::3]
        without = [told(np.delete(np.arange(ROWS), row)) for row in mine]
        for name, whole in before.items():
            moved = [np.abs(part[name] - whole).max(initial=0.0) for part in without]
            if 0 < sum(each > 1e-12 * (1.0 + np.abs(whole).max(initial=0.0)) for each in moved) < len(mine):
                raise _Broken(
                    f"'{name}' of its answer is about some rows of class {label} and not others, so that "
                    "totals set few rows apart. Take rows with `data.taking`, in whole folds.",
                )


_SHARES = [*_dealt(4).values()]
_NAMES = ("north", "east", "south", "west")  # other names: terms are therefore added in another order
_DIVISIONS: dict[str, dict[str, Clients]] = {
    "partition": {"rows dealt one by one": _dealt(4), "rows sorted by class": _by_class(4)},
    "number of clients": {f"{count} clients": _dealt(count) for count in (1, 2, 8, 24)},
    "order": {
        "one order": dict(zip(_NAMES, _SHARES, strict=True)),
        "another order": dict(zip(_NAMES, reversed(_SHARES), strict=True)),
    },
}

CHECKS: dict[str, Callable[[Method[Any]], None]] = {
    "declaration": _declaration,
    **{name: _of_partitions(divisions) for name, divisions in _DIVISIONS.items()},
    "workers": _workers,
    "empty clients": _empty_clients,
    "repeat": _repeat,
    "resume": _resume,
    "encoding": _encoding,
    "files": _files,
    "bad input": _bad_input,
    "gathers": _gathers,
    "cells": _cells,
}
"""The checks by name."""

_OF_PARTITIONS = {*_DIVISIONS, "cells"}
"""Those that hold of methods whose models do not depend on who owns which rows."""
