"""`predict` gives every row of an address, by name, in the order of the file; `evaluate` keeps the split."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from tests.command import document, fedsolve, refused

ROWS = 50


def write(path, columns):
    with open(path, "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One table in two orders, the same as npz, and models trained on the file and on the address."""
    folder = tmp_path_factory.mktemp("rows")
    rng = np.random.default_rng(2)
    labels = np.arange(ROWS) % 2
    columns = {
        name: rng.normal(size=ROWS) * scale + labels for name, scale in (("a", 1), ("b", 5), ("c", 0.2))
    }
    write(folder / "d.csv", columns | {"y": labels})
    write(folder / "shuffled.csv", {name: (columns | {"y": labels})[name] for name in ("c", "y", "b", "a")})
    np.savez(folder / "d.npz", x=np.column_stack(list(columns.values())), y=labels)
    for data, name in ((folder / "d.csv", "file"), (f"csv:{folder / 'd.csv'}?test=0", "address")):
        document("train", data, "--method", "afl", "--clients", 2, "--out", folder / name)
    return folder


def lines(folder, model, data, *words):
    result = fedsolve("predict", folder / model, data, *words)
    assert result.exit_code == 0, result.stderr
    return result.stdout.splitlines()[1:]


@pytest.mark.parametrize("model", ["file", "address"])
def test_every_row_of_an_address_in_the_order_of_the_file(folder, model):
    expected = lines(folder, model, folder / "d.csv", "--scores")
    assert len(expected) == ROWS
    for data in ("csv:{}/d.csv", "csv:{}/shuffled.csv", "csv:{}/d.csv?test=0.5", "npz:{}/d.npz"):
        assert lines(folder, model, data.format(folder), "--scores") == expected
    assert len(lines(folder, model, f"csv:{folder}/d.csv", "--part", "test")) == ROWS // 5


@pytest.mark.parametrize("model", ["file", "address"])
def test_evaluate_finds_columns_of_an_address_by_name(folder, model):
    first, second = (
        document("evaluate", folder / model, f"csv:{folder}/{name}?label=y", "--part", "test")
        for name in ("d.csv", "shuffled.csv")
    )
    assert first["rows"] == ROWS // 5
    assert first["accuracy"] == second["accuracy"]
    assert first["confusion"] == second["confusion"]


def test_another_test_file_of_an_address_is_read_by_name(folder, tmp_path):
    address = f"csv:{folder}/d.csv?label=y&test={folder}/"
    words = ("--method", "afl", "--clients", 2)
    first, second = (
        document("train", address + name, *words)["accuracy"] for name in ("d.csv", "shuffled.csv")
    )
    assert first == second
    text = (folder / "d.csv").read_text().replace("b,", "bb,", 1)
    (tmp_path / "renamed.csv").write_text(text)
    result = fedsolve("train", f"csv:{folder}/d.csv?label=y&test={tmp_path}/renamed.csv", *words)
    refused(result, 2, "renamed.csv", "column 'b' is missing")


def test_every_image_of_a_folder(tmp_path):
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for kind, light in (("dark", 40), ("light", 200)):
        (tmp_path / "images" / kind).mkdir(parents=True)
        for number in range(10):
            pixels = np.clip(light + 20 * rng.normal(size=(8, 8)), 0, 255).astype(np.uint8)
            image.fromarray(pixels).save(tmp_path / "images" / kind / f"{number}.png")
    words = ("--backbone", "pixels:8x8", "--store", tmp_path / "store")
    address = f"folder:{tmp_path / 'images'}"
    document("train", address, "--method", "afl", "--clients", 2, *words, "--out", tmp_path / "m")
    assert len(lines(tmp_path, "m", address, *words)) == 20
    assert len(lines(tmp_path, "m", address, *words, "--part", "test")) == 4
