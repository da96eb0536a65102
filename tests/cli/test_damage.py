"""A damaged file is refused by name, with what to do; it never gives a wrong result."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import fedsolve as fs
from fedsolve import container
from fedsolve.data.feature_store import FeatureStore
from fedsolve.errors import ModelFileError
from fedsolve.federation.participant import ClientData
from fedsolve.federation.states import StateStore

X = np.random.default_rng(0).standard_normal((120, 6))
Y = np.argmax(X[:, :3], axis=1)
METHOD = fs.DeepAFL(layers=4, width=12, exchange="single")
FLIPS = 40


class Stop(Exception):
    pass


def federation() -> fs.LocalFederation:
    return fs.LocalFederation.from_arrays(X, Y, np.arange(len(Y)) % 3)


def stop(record, expected) -> None:
    if record.exchange == 1:
        raise Stop


def contents(model: fs.Model) -> bytes:
    return container.to_bytes(*model.contents())


# Every kind writes its files into a folder, and gives those that are damaged in turn with what reads them.


def checkpoint(folder: Path):
    path = folder / "run.safetensors"
    with pytest.raises(Stop):
        METHOD.fit(federation(), checkpoint=path, follow=stop)
    return [path], lambda: contents(METHOD.fit(federation(), checkpoint=path, resume=True))


def model(folder: Path):
    path = folder / "model.safetensors"
    METHOD.fit(federation()).save(path)
    return [path], lambda: contents(fs.load_model(path))


def personal_model(folder: Path):
    path = folder / "own.safetensors"
    shared = fs.APFL(width=12, refinement_width=12).fit(federation())
    shared.personalised(ClientData(X[::3], Y[::3])).save(path, growing=True)
    return [path], lambda: contents(fs.load_model(path))


def client_state(folder: Path):
    store = StateStore(folder, "north")
    store.write("a1", 3, {"control": X[:5], "dual": Y[:4]}, None)
    read = lambda: container.to_bytes(StateStore(folder, "north").read("a1", 3), {})  # noqa: E731
    return list(folder.rglob("*.safetensors")), read


def agreement(folder: Path):
    from fedsolve.federation.engine import Spec
    from fedsolve.network.agreement import Agreement
    from fedsolve.network.running import State

    settled = Agreement("classification", secure=True)
    settled.spec = Spec(6, np.array(["no", "yes"]), 2, "bytes")
    settled.columns, settled.only = {"names": ["age", "weight"]}, frozenset({"north", "south"})
    state = State(folder)
    state.agree(SimpleNamespace(expected=3, agreement=settled))  # type: ignore[arg-type]
    state.checkpoint.write_bytes(b"")

    def read():
        return repr(State(folder).begun())

    return [folder / "agreement.json"], read


def rows_of_runs(folder: Path):
    pytest.importorskip("flwr")
    from fedsolve.federation.fingerprints import RowsByRun

    path = folder / "rows.json"
    assert RowsByRun(path, ClientData(X, Y)).same("run")

    def read():
        again = RowsByRun(path, ClientData(X[1:], Y[1:])).same("run")
        kept = container.from_sealed_json(path.read_bytes(), what="", error=ModelFileError, remedy="")
        return repr((again, kept))

    return [path], read


def features(folder: Path):
    from tests.data.test_feature_store import Sums, some

    store = FeatureStore(folder)
    key = store.build(some(), Sums(), batch=5).key

    def read():
        stored = FeatureStore(folder).get(key)
        parts = (stored.x_train, stored.y_train, stored.x_test, stored.y_test)
        about = (stored.class_names, stored.classes.tolist(), stored.manifest["width"])
        return repr(([np.asarray(part).tobytes() for part in parts if part is not None], about))

    return sorted((folder / key).iterdir()), read


def refusal(read: Callable, right) -> str | None:
    """The words of the refusal; None where a bit said nothing, such as one of a space between two words."""
    try:
        again = read()
    except fs.FedsolveError as problem:
        return str(problem)
    assert again == right
    return None


KINDS: list[Callable] = [checkpoint, model, personal_model, client_state, agreement, rows_of_runs, features]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_flipped_bits_are_refused(kind: Callable, tmp_path: Path) -> None:
    """280 flips over seven kinds of files; the trial of which 52 of 60 gave a wrong model."""
    paths, read = kind(tmp_path)
    whole = {path: path.read_bytes() for path in paths}
    right = read()
    for path, data in whole.items():
        path.write_bytes(data)
    rng = random.Random(kind.__name__)
    sizes = [len(data) for data in whole.values()]
    refused = 0
    for _ in range(FLIPS):
        path = rng.choices(paths, sizes)[0]
        damaged = bytearray(whole[path])
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        said = refusal(read, right)
        refused += said is not None
        assert said is None or (path.name in said and said.endswith("."))
        for other, data in whole.items():
            other.write_bytes(data)
    assert refused >= 0.9 * FLIPS
    assert read() == right


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("damage", ["empty", "cut", "foreign", "zeros", "another of its kind"])
def test_other_damage_is_refused(kind: Callable, damage: str, tmp_path: Path) -> None:
    paths, read = kind(tmp_path)
    path = max(paths, key=lambda one: one.stat().st_size)
    data = path.read_bytes()
    if damage == "another of its kind":
        # The seal of one file on the contents of another.
        if path.suffix != ".safetensors":
            pytest.skip("the seal of a text is part of it, and flips were tried")
        arrays, note = container.from_bytes(data, what="", error=ModelFileError)
        changed = {name: array + 1 if array.dtype.kind == "f" else array for name, array in arrays.items()}
        length = int.from_bytes(data[:8], "little")
        other = container.to_bytes(changed, note, sealed=True)
        path.write_bytes(data[: 8 + length] + other[8 + int.from_bytes(other[:8], "little") :])
    else:
        path.write_bytes(
            {
                "empty": b"",
                "cut": data[: len(data) // 2],
                "foreign": b"PK\x03\x04" + bytes(range(256)),
                "zeros": bytes(len(data)),
            }[damage]
        )
    with pytest.raises(fs.FedsolveError) as caught:
        read()
    assert path.name in str(caught.value)


def test_the_checkpoint_before_the_last_is_kept_and_named(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    right = contents(METHOD.fit(federation()))
    with pytest.raises(Stop):
        METHOD.fit(federation(), checkpoint=path, follow=stop)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match=r"The one before it is .*run\.safetensors\.previous: move it"):
        METHOD.fit(federation(), checkpoint=path, resume=True)
    Path(f"{path}{container.PREVIOUS}").replace(path)
    assert contents(METHOD.fit(federation(), checkpoint=path, resume=True)) == right


def test_a_gradient_run_goes_on_from_the_checkpoint_before_the_last(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    method = fs.gradient.Scaffold(rounds=4, epochs=1)
    path = tmp_path / "run.safetensors"
    right = contents(method.fit(federation()))
    with pytest.raises(Stop):
        method.fit(federation(), checkpoint=path, follow=stop)
    Path(f"{path}{container.PREVIOUS}").replace(path)
    assert contents(method.fit(federation(), checkpoint=path, resume=True)) == right


def test_features_are_for_their_owner_alone(tmp_path: Path) -> None:
    paths, _ = features(tmp_path)
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    assert paths[0].parent.stat().st_mode & 0o777 == 0o700


def test_a_seal_is_of_contents_not_of_spelling() -> None:
    note = {"b": [1, 2.5, "ü"], "a": None}
    again = json.dumps(json.loads(container.sealed_json(note)), sort_keys=True).encode()
    assert container.from_sealed_json(again, what="", error=ModelFileError, remedy="") == note
