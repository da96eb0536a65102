"""Labels have one type from the file to the model, whichever command reads them."""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.cli.run_options import named_classes
from fedsolve.data.datasets import load_dataset
from fedsolve.data.datasets.dataset import Dataset, Split
from fedsolve.data.feature_store import FeatureStore
from fedsolve.data.images import ArrayImages
from fedsolve.errors import CohortError, DataError
from fedsolve.experiments.config import DatasetSpec
from fedsolve.experiments.sources import StoredRows
from fedsolve.labels import labels_like, spelled_labels
from fedsolve.model import Model
from fedsolve.network.answering import Answerer
from fedsolve.network.network_federation import NetworkFederation
from fedsolve.tables.table_file import read_table
from tests.command import document, fedsolve, refused
from tests.network.pretended import PretendedLink
from tests.toy import opening, toy_data, written

LABELS: dict[str, list[Any]] = {
    "whole": [3, 7, 10],
    "negative": [-1, 0, 1],
    "real": [0.5, 1.0, 2.0],
    "whole-real": [1.0, 2.0, 3.0],
    "boolean": [False, True],
    "text": ["ant", "bee", "cat"],
    "codes": ["007", "008", "012"],
    "lowercase": ["false", "true"],
}
KINDS = {"whole": "i", "negative": "i", "real": "f", "whole-real": "f", "boolean": "b"}
"""Kind of numpy type of each; text where it is not said."""

X, CODES = toy_data(90, seed=2)

Written = tuple[Path, np.ndarray]


def write_csv(path: Path, labels: np.ndarray) -> Path:
    with open(path, "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*"abcdef", "label"])
        writer.writerows([*row, label] for row, label in zip(X.tolist(), labels.tolist(), strict=True))
    return path


def write_npz(path: Path, labels: np.ndarray) -> Path:
    np.savez(path, x=X, y=labels)
    return path


def write_parquet(path: Path, labels: np.ndarray) -> Path:
    from pyarrow import parquet, table

    parquet.write_table(table(dict(zip("abcdef", X.T, strict=True)) | {"label": labels.tolist()}), path)
    return path


WRITERS: dict[str, Callable[[Path, np.ndarray], Path]] = {
    "csv": write_csv,
    "npz": write_npz,
    "parquet": write_parquet,
}


@pytest.fixture(params=[(kind, labels) for kind in WRITERS for labels in LABELS], ids="-".join)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Written:
    """A file of each kind with labels of each type, and the labels."""
    kind, name = request.param
    classes = np.array(LABELS[name])
    assert classes.dtype.kind == KINDS.get(name, "U")
    labels = classes[CODES % len(classes)]
    return WRITERS[kind](tmp_path / f"data.{kind}", labels), labels


def same_labels(model: Model, labels: np.ndarray) -> None:
    assert model.classes is not None
    assert model.classes.dtype.kind == labels.dtype.kind
    assert model.classes.tolist() == np.unique(labels).tolist()


def trained(data: object, folder: Path) -> Model:
    out = folder / "model.safetensors"
    document("train", data, "--method", "afl", "--ridge", 0.1, "--clients", 3, "--out", out)
    return fs.load_model(out)


def networked(path: Path, classes: str | None = None) -> Model:
    """The model of two sites that share the file's rows."""
    table = read_table(path)
    sites = [
        Answerer(name, fs.ClientData(table.features[half], table.labels[half]), share_classes=True)
        for name, half in (("east", slice(0, 40)), ("west", slice(40, None)))
    ]
    link = PretendedLink(sites)
    federation = NetworkFederation(link, clients=2, classes=named_classes(classes), interval=0.001, grace=0.0)
    return fs.AFL(ridge=0.1).fit(federation)


def test_training_keeps_them_whether_a_file_is_named_by_path_or_by_address(
    file: Written, tmp_path: Path
) -> None:
    path, labels = file
    same_labels(trained(path, tmp_path), labels)
    same_labels(trained(f"{path.suffix[1:]}:{path}?test=0", tmp_path), labels)


def test_experiments_keep_them(file: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, labels = file
    fit, models = fs.AFL.fit, []
    monkeypatch.setattr(
        fs.AFL, "fit", lambda *given, **options: models.append(fit(*given, **options)) or models[-1]
    )
    head = opening("types", 1.0, 3, f'address = "{path.suffix[1:]}:{path}"', seeds=(0,))
    toml = written(tmp_path, f'{head}[[method]]\nname = "AFL"\nmethod = "afl"\nparameters = {{ridge = 0.1}}')
    document("experiment", "run", toml, "--runs", tmp_path / "runs")
    (model,) = models
    same_labels(model, labels)


def test_a_network_keeps_them_with_and_without_a_class_list(file: Written) -> None:
    path, labels = file
    same_labels(networked(path), labels)
    same_labels(networked(path, ",".join(map(str, np.unique(labels).tolist()))), labels)


def test_predictions_are_labels_of_the_training_file(file: Written, tmp_path: Path) -> None:
    path, labels = file
    model = trained(path, tmp_path)
    result = fedsolve("predict", tmp_path / "model.safetensors", path)
    cells = [row["label"] for row in csv.DictReader(io.StringIO(result.stdout))]
    predicted = model.predict(X)
    assert set(predicted.tolist()) <= set(labels.tolist())
    assert cells == [str(label) for label in predicted.tolist()]
    assert document("evaluate", tmp_path / "model.safetensors", path)["accuracy"] == np.mean(
        predicted == labels
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", LABELS)
def test_a_model_is_evaluated_on_every_kind_of_file(name: str, tmp_path: Path) -> None:
    classes = np.array(LABELS[name])
    labels = classes[CODES % len(classes)]
    paths = [write(tmp_path / f"data.{kind}", labels) for kind, write in WRITERS.items()]
    for path in paths:
        trained(path, tmp_path)
        found = [
            document("evaluate", tmp_path / "model.safetensors", data)["accuracy"]
            for data in (*paths, *(f"{other.suffix[1:]}:{other}?test=0" for other in paths))
        ]
        assert len(set(found)) == 1


# -- labels of another type ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["1", "-2", "10"], [1, -2, 10]),
        (["1", "1.0", "2"], [1.0, 1.0, 2.0]),
        (["True", "False"], [True, False]),
        (["True", "1"], ["True", "1"]),
        (["01", "2"], ["01", "2"]),
        (["1e3", "2"], ["1e3", "2"]),
        (["1_0", "2"], ["1_0", "2"]),
        (["true", "false"], ["true", "false"]),
    ],
)
def test_text_is_what_all_of_it_spells(texts: list[str], expected: list[Any]) -> None:
    labels = spelled_labels(texts)
    assert labels.tolist() == expected
    assert labels.dtype.kind == np.array(expected).dtype.kind


@pytest.mark.parametrize(
    ("labels", "classes", "expected"),
    [
        (["1", "0"], [0, 1], [1, 0]),
        (["True", "False"], [False, True], [True, False]),
        ([True, False], ["False", "True"], ["True", "False"]),
        ([True, False], [0, 1], [1, 0]),
        ([1, 0], [False, True], [True, False]),
        ([2**53 + 1], [2**53, 2**53 + 1], [2**53 + 1]),
        ([str(2**53 + 1)], [2**53, 2**53 + 1], [2**53 + 1]),
    ],
)
def test_labels_of_another_type_are_matched_where_they_say_the_same(
    labels: list[Any], classes: list[Any], expected: list[Any]
) -> None:
    assert labels_like(np.array(labels), np.array(classes)).tolist() == expected


@pytest.mark.parametrize(
    ("labels", "classes", "named"),
    [
        (["007"], [6, 7], "'007'"),
        (["1_0"], [1, 10], "'1_0'"),
        ([1.0], ["1", "2"], "'1.0'"),
        ([True], [1, 2], "True"),
        (["True"], [1, 2], "True"),
        (["yes"], [False, True], "'yes'"),
        ([2], [False, True], "2"),
    ],
)
def test_labels_of_another_type_are_refused_by_name(
    labels: list[Any], classes: list[Any], named: str
) -> None:
    with pytest.raises(DataError, match=f"label {named} in row 0 is not one of the 2 classes"):
        labels_like(np.array(labels), np.array(classes))


def test_a_test_file_of_another_type_is_refused_before_training(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "numbers.csv", CODES)
    other = write_csv(tmp_path / "names.csv", np.array(["ant", "bee", "cat"])[CODES])
    refused(fedsolve("train", path, "--test", other), 2, "names.csv", "label 'ant'", "(0, 1, 2)")


def test_a_site_whose_labels_are_of_another_type_is_not_taken_in() -> None:
    parts = {"east": CODES % 2, "west": CODES % 2 == 1}
    sites = [Answerer(name, fs.ClientData(X, labels), share_classes=True) for name, labels in parts.items()]
    federation = NetworkFederation(PretendedLink(sites), clients=2, interval=0.001, grace=0.0, patience=0.05)
    with pytest.raises(CohortError, match=r"'west' sent .* booleans, those of the others numbers"):
        federation.describe()


def test_a_site_keeps_its_own_labels_from_run_to_run() -> None:
    sites = [Answerer(name, fs.ClientData(X, CODES), share_classes=True) for name in ("east", "west")]
    for classes, kind in ((["0", "1", "2"], "U"), (None, "i"), ([0.0, 1.0, 2.0], "f")):
        link = PretendedLink(sites)
        federation = NetworkFederation(link, clients=2, classes=classes, interval=0.001, grace=0.0)
        model = fs.AFL(ridge=0.1).fit(federation)
        assert model.classes is not None
        assert model.classes.dtype.kind == kind


# -- datasets with names ---------------------------------------------------------------------------


def some_images(names: tuple[str, ...], labels: Any = None) -> Dataset:
    rng = np.random.default_rng(0)
    images = ArrayImages(rng.integers(0, 256, (12, 4, 4), dtype=np.uint8))
    return Dataset("some", Split(images, np.arange(12) % len(names)), None, names, labels)


def test_names_of_classes_are_labels_and_numbers_among_them_are_numbers() -> None:
    assert some_images(("b", "a")).classes.tolist() == ["b", "a"]
    assert some_images(("2", "10")).classes.tolist() == [2, 10]
    assert some_images(("1", "1.0")).classes.tolist() == ["1", "1.0"]
    assert some_images(("one", "two"), np.array([1, 2])).classes.tolist() == [1, 2]
    assert load_dataset("digits").classes.tolist() == list(range(10))


def test_an_npz_with_class_names_has_the_labels_of_its_array(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, x=X, y=CODES, class_names=["one", "two", "three"])
    dataset = load_dataset(f"npz:{path}")
    assert dataset.class_names == ("one", "two", "three")
    same_labels(trained(path, tmp_path), CODES)
    same_labels(trained(f"npz:{path}", tmp_path), CODES)


def test_stored_features_know_their_labels(tmp_path: Path) -> None:
    from fedsolve.data.backbones import load_backbone

    store, backbone = FeatureStore(tmp_path), load_backbone("pixels")
    text = some_images(("1", "2"), np.array(["1", "2"]))
    key = store.build(text, backbone).key
    assert store.get(key).classes.tolist() == ["1", "2"]
    # The same images and names with labels of another type: the same features.
    numbers = some_images(("1", "2"), np.array([1, 2]))
    assert store.build(numbers, backbone).key == key
    assert store.build(numbers, backbone).classes.tolist() == [1, 2]


def test_an_experiment_keeps_the_order_of_a_datasets_classes(tmp_path: Path) -> None:
    """Class folders in the order of their numbers; names of another order than their own stay numbers."""
    from PIL import Image

    def rows(*names: str) -> np.ndarray:
        folder = tmp_path / "-".join(names)
        for number, name in enumerate(names):
            (folder / name).mkdir(parents=True)
            for image in range(3):
                Image.new("L", (4, 4), 40 * number + image).save(folder / name / f"{image}.png")
        spec = DatasetSpec("d", f"folder:{folder}?test=0", backbone="pixels")
        return np.unique(StoredRows(store=tmp_path / "store")(spec, 0, lambda remark: None).y_train)

    assert rows("ant", "bee").tolist() == ["ant", "bee"]
    assert rows("2", "10").tolist() == [2, 10]
    assert rows("2", "010").tolist() == [0, 1]


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        (["very ILL", "well"], ["classes differ in case or spaces only: 'very  ill' and 'very ILL'. If"]),
        (["very  ill", "well"], []),
    ],
)
def test_sites_that_spell_a_class_in_another_case_are_told(theirs: list[str], told: list[str]) -> None:
    labels = np.array(["very  ill", "well"] * 5 + theirs * 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        federation = fs.LocalFederation.from_arrays(X[:20], labels, np.repeat([0, 1], 10))
        fs.AFL().fit(federation)
        fs.LocalFederation.from_arrays(X[:20], np.array(["a", "A"] * 10), np.zeros(20, dtype=int))
    found = [str(one.message) for one in caught if one.category is fs.SpellingWarning]
    assert [text for text in found if not any(text.startswith(start) for start in told)] == []
    assert bool(found) is bool(told)
