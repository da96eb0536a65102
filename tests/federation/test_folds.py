"""Held-out marks: by the content of a row alone."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from fedsolve.errors import DataError
from fedsolve.federation.folds import fold_numbers, row_hashes


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(20_000, 5))
    features[::7, 2] = np.nan
    return features, rng.integers(0, 3, len(features))


def mark(values, label, key):
    """The documented hash in whole numbers."""
    size = 2**64

    def mixed(h):
        h ^= h >> 30
        h = h * 0xBF58476D1CE4E5B9 % size
        h ^= h >> 27
        h = h * 0x94D049BB133111EB % size
        return h ^ (h >> 31)

    h = int.from_bytes(hashlib.blake2b(f"held out|{key}".encode(), digest_size=8).digest(), "little")
    for number, value in enumerate(values):
        word = 0x7FF8000000000000 if np.isnan(value) else int(np.float64(value).view(np.uint64))
        h = (mixed(h ^ word) * 0x9E3779B97F4A7C15 + number) % size
    word = int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "little")
    return mixed((mixed(h ^ word) * 0x9E3779B97F4A7C15 - 1) % size)


def test_marks_are_the_documented_hash(rows):
    features = rows[0][:20]
    labels = np.array([f"class {number % 3}" for number in range(20)])
    expected = [mark(values, label, "k") for values, label in zip(features, labels, strict=True)]
    assert row_hashes(features, labels, "k").tolist() == expected


def test_a_row_is_on_one_side_wherever_it_is(rows):
    features, labels = rows
    fold = fold_numbers(row_hashes(features, labels))
    order = np.random.default_rng(1).permutation(len(labels))
    np.testing.assert_array_equal(fold_numbers(row_hashes(features[order], labels[order])), fold[order])
    owners = np.random.default_rng(2).integers(0, 9, len(labels))
    for client in range(9):
        own = owners == client
        np.testing.assert_array_equal(fold_numbers(row_hashes(features[own], labels[own])), fold[own])
    assert fold_numbers(row_hashes(features[:1], labels[:1]))[0] == fold[0]
    assert fold_numbers(row_hashes(features[:0], labels[:0])).shape == (0,)


def test_equal_rows_are_equal_in_every_type(rows):
    features, labels = rows
    short = features.astype(np.float32)
    np.testing.assert_array_equal(
        row_hashes(short, labels), row_hashes(short.astype(np.float64), labels * 1.0)
    )
    np.testing.assert_array_equal(row_hashes(np.zeros((2, 3))), row_hashes(-np.zeros((2, 3))))
    np.testing.assert_array_equal(
        row_hashes(np.arange(6).reshape(3, 2)), row_hashes(np.arange(6.0).reshape(3, 2))
    )
    odd = np.array([0x7FF8000000000001, 0xFFF8000000000000], dtype=np.uint64).view(np.float64)[:, None]
    assert len(set(row_hashes(odd).tolist())) == 1
    targets = np.array([1.0, 2.5])
    assert row_hashes(features[:2], targets)[0] == row_hashes(features[:1], targets[:1])[0]


@pytest.mark.parametrize("count", [2, 3, 12])
def test_folds_are_of_about_equal_size_in_every_class(rows, count):
    features, labels = rows
    found, within = fold_numbers(row_hashes(features, labels), count), 4 * np.sqrt(0.25 / len(labels))
    assert np.all(np.abs(np.bincount(found, minlength=count) / len(labels) - 1 / count) < within)
    for label in range(3):
        shares = np.bincount(found[labels == label], minlength=count) / np.sum(labels == label)
        assert np.all(np.abs(shares - 1 / count) < 2 * within)


def test_key_label_and_every_value_matter(rows):
    features, labels = rows
    base = row_hashes(features, labels)
    others = [row_hashes(features, labels, 1), row_hashes(features, labels, "0 "), row_hashes(features)]
    others.append(row_hashes(features, (labels + 1) % 3))
    others.append(row_hashes(features[:, ::-1], labels))
    for column in range(5):
        changed = features.copy()
        changed[:, column] = np.nextafter(np.nan_to_num(changed[:, column], nan=1.0), 9)
        others.append(row_hashes(changed, labels))
    for other in others:
        flipped = np.unpackbits((base ^ other).view(np.uint8)).mean()
        assert abs(flipped - 0.5) < 0.01  # every bit changes half of the time


@pytest.mark.parametrize(
    "call",
    [
        lambda: fold_numbers(row_hashes(np.zeros((2, 2))), 1),
        lambda: row_hashes(np.zeros(3)),
        lambda: row_hashes(np.array([["a"]])),
        lambda: row_hashes(np.zeros((2, 2)), [1]),
    ],
)
def test_mistakes_are_refused(call):
    with pytest.raises(DataError):
        call()
