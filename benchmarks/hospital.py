"""A raw table of four hospitals through `fedsolve schema` and `fedsolve train`, no other option given.

`python -m benchmarks.hospital` prints, for every seeded split of breast cancer, the test accuracy of the
model beside that of a scikit-learn pipeline on the pooled rows (imputation, one-hot, standardisation,
logistic regression), and their means with 95 % intervals over the splits; then the same for a table with 5 %
positives, by the area under the ROC curve. `--epsilon 1` trains AFL with noise in place of the default.
The csv has an identifier, a date, two categories and 10 % of its values missing. The label of no test row is
seen before the numbers are printed.
"""

from __future__ import annotations

import csv
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import t
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_breast_cancer, make_classification
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from benchmarks.machine import progress, save
from fedsolve.arrays import Array
from fedsolve.cli.main import main as command
from fedsolve.model import Model, load_model
from fedsolve.tables.table_file import read_table

HOSPITALS = ("north", "south", "east", "west")
MISSING = 0.1
SPLITS = 20
WARDS, COLOURS = ("a", "b", "c"), ("red", "green", "blue", "grey")
EXTRA = ("admitted", "ward", "colour")


@dataclass(frozen=True)
class Raw:
    """Cells of a table as text, numbers as numbers (NaN where missing), and labels."""

    names: list[str]
    numbers: Array
    texts: Array
    labels: Array


def raw_table(features: Array, labels: Array, names: list[str], seed: int = 0) -> Raw:
    """The table with two categories and a date added, and a tenth of all values missing."""
    rng = np.random.default_rng([seed, 12])
    rows = len(features)
    days = [str(date(2020, 1, 1) + timedelta(days=int(day))) for day in rng.integers(0, 1500, rows)]
    texts = np.column_stack([days, rng.choice(WARDS, rows), rng.choice(COLOURS, rows)]).astype(object)
    numbers = np.where(rng.random(features.shape) < MISSING, np.nan, features)
    texts[rng.random(texts.shape) < MISSING] = ""
    return Raw(names, numbers, texts, labels)


def write_csv(path: Path, raw: Raw, rows: Array, owners: Array) -> None:
    """These rows as a hospital's export: an identifier first, then everything else."""
    with path.open("w", newline="") as stream:
        out = csv.writer(stream)
        out.writerow(["patient_id", "hospital", *EXTRA, *raw.names, "diagnosis"])
        for row, owner in zip(rows, owners, strict=True):
            cells = ["" if np.isnan(value) else repr(float(value)) for value in raw.numbers[row]]
            out.writerow([100_000 + 7 * int(row), owner, *raw.texts[row], *cells, raw.labels[row]])


def pipeline(width: int) -> Any:
    """What a user of scikit-learn would write for the pooled rows."""
    numeric = make_pipeline(SimpleImputer(add_indicator=True), StandardScaler())
    return make_pipeline(
        ColumnTransformer(
            [
                ("numbers", numeric, list(range(width + 1))),
                ("categories", OneHotEncoder(handle_unknown="ignore"), [width + 1, width + 2]),
            ]
        ),
        LogisticRegression(max_iter=2000),
    )


def pooled(raw: Raw, rows: Array) -> Array:
    """The same rows for scikit-learn: numbers, days since 2020, and two columns of text."""
    start = date(2020, 1, 1)
    days = [np.nan if not day else float((date.fromisoformat(day) - start).days) for day in raw.texts[:, 0]]
    columns = [*raw.numbers.T, np.array(days), raw.texts[:, 1], raw.texts[:, 2]]
    return np.array(columns, dtype=object).T[rows]


def train(folder: Path, raw: Raw, rows: Array, owners: Array, more: Sequence[str] = ()) -> Model:
    """The two commands, as a user types them."""
    folder.mkdir(parents=True, exist_ok=True)
    table, schema, model = folder / "patients.csv", folder / "schema.toml", folder / "model.safetensors"
    write_csv(table, raw, rows, owners)
    for words in (
        ["schema", table, "--label", "diagnosis", "--client-column", "hospital", "--out", schema, "--quiet"],
        ["train", table, "--schema", schema, "--out", model, "--quiet", *more],
    ):
        try:
            command.main([str(word) for word in words])
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"fedsolve {words[0]} ended with {end.code}") from end
    return load_model(model)


def measured(
    folder: Path, raw: Raw, split: int, by_area: bool, partitions: int = 1, more: Sequence[str] = ()
) -> dict[str, Any]:
    """Ours and scikit-learn's score on the test rows of a split, and how far other partitions move ours."""
    places = np.arange(len(raw.labels))
    training, test = train_test_split(places, test_size=0.25, stratify=raw.labels, random_state=split)
    scores = []
    for partition in range(partitions):
        owners = np.random.default_rng([split, partition]).choice(HOSPITALS, len(training))
        model = train(folder / f"{split}-{partition}", raw, training, owners, more)
        write_csv(folder / "test.csv", raw, test, np.full(len(test), HOSPITALS[0]))
        schema = model.schema
        assert schema is not None
        rows = read_table(folder / "test.csv", schema, extra="ignore")
        scores.append(model.decision_function(rows.features))
    classes = model.classes
    assert classes is not None
    truth = raw.labels[test]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = pipeline(raw.numbers.shape[1]).fit(pooled(raw, training), raw.labels[training])
    if by_area:
        ours = roc_auc_score(truth, scores[0][:, 1] - scores[0][:, 0])
        reference = roc_auc_score(truth, theirs.decision_function(pooled(raw, test)))
    else:
        ours = np.mean(classes[np.argmax(scores[0], axis=1)] == truth)
        reference = theirs.score(pooled(raw, test), truth)
    apart = max((float(np.abs(other - scores[0]).max()) for other in scores[1:]), default=None)
    return {"ours": float(ours), "scikit-learn": float(reference), "apart": apart}


def breast_cancer() -> Raw:
    """Breast cancer as two words, malignant and benign."""
    data = load_breast_cancer()
    names = [str(name).replace(" ", "_") for name in data.feature_names]
    return raw_table(data.data, data.target_names[data.target].astype(object), names)


def rare() -> Raw:
    """Two classes, 5 % of the second."""
    features, labels = make_classification(3000, 20, n_informative=8, weights=[0.95], random_state=0)
    return raw_table(features, labels, [f"x{place}" for place in range(features.shape[1])])


TABLES = {"breast cancer": (breast_cancer, False), "5 % positives": (rare, True)}


@click.command()
@click.option("--splits", default=SPLITS, show_default=True, type=click.IntRange(2, SPLITS))
@click.option("--first", default=0, show_default=True, help="Number of the first split.")
@click.option("--table", "only", multiple=True, type=click.Choice(list(TABLES)), help="Both without it.")
@click.option("--epsilon", type=float, help="Train AFL with this much noise.")
@click.option("--json", "target", type=click.Path(path_type=Path), help="Where to write every split.")
def main(splits: int, first: int, only: tuple[str, ...], epsilon: float | None, target: Path | None) -> None:
    """Two commands on raw hospital tables, beside scikit-learn on the pooled rows."""
    console = Console(width=110)
    document: dict[str, Any] = {"epsilon": epsilon}
    more = () if epsilon is None else ("--method", "afl", "--epsilon", f"{epsilon:g}")
    for name in only or tuple(TABLES):
        make, by_area = TABLES[name]
        raw = make()
        page = Table("split", "fedsolve train", "scikit-learn", "other partition", title=name)
        found = []
        with tempfile.TemporaryDirectory() as folder:
            for split in range(first, first + splits):
                progress(f"{name}: split {split - first + 1} of {splits}")
                partitions = 2 if split == first and epsilon is None else 1
                found.append(measured(Path(folder), raw, split, by_area, partitions, more))
        for split, one in enumerate(found, first):
            apart = "" if one["apart"] is None else f"{one['apart']:.1e}"
            page.add_row(str(split), f"{100 * one['ours']:.2f}", f"{100 * one['scikit-learn']:.2f}", apart)
        page.add_section()
        means = [100 * float(np.mean([one[key] for one in found])) for key in ("ours", "scikit-learn")]
        spread = [
            100 * float(np.std([one[key] for one in found], ddof=1)) for key in ("ours", "scikit-learn")
        ]
        reach = [float(t.ppf(0.975, splits - 1)) * each / splits**0.5 for each in spread]
        told = [f"{mean:.2f} ± {wide:.2f}" for mean, wide in zip(means, reach, strict=True)]
        page.add_row("mean", *told, f"{means[0] - means[1]:+.2f}")
        console.print(page)
        document[name] = {"mean": dict(zip(("ours", "scikit-learn"), means, strict=True)), "splits": found}
        document[name]["interval"] = dict(zip(("ours", "scikit-learn"), reach, strict=True))
    save(target, document)


if __name__ == "__main__":
    main()
