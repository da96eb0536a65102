"""Attacks on a site's own rows: what they find, and that a broken mechanism is found."""

from __future__ import annotations

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.federation.messages import Term
from fedsolve.federation.noisy_sums import NoisyAnswer
from fedsolve.privacy.attacks import _Attack, audit, lower_bound
from fedsolve.tables.schema import Column, Schema
from tests.command import document, fedsolve


def site(rows, width, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, rows)
    data = fs.ClientData(rng.standard_normal((rows, width)) + 0.3 * labels[:, None], labels)
    return data, fs.LocalFederation([fs.Participant("a", data)]).describe()


def of(findings, view, name):
    return next(one for one in findings if (one.view, one.name) == (view, name))


def half(release, term):
    exact, noised = release.in_steps(term), release.noised(term)
    arrays = {n: np.rint((exact.arrays[n] + noised.arrays[n]) / 2) for n in exact.arrays}
    return Term(arrays, {}, exact.symmetric)


def exact_counts(release, term):
    exact, noised = release.in_steps(term), release.noised(term)
    return Term({n: (exact if n == "rows" else noised).arrays[n] for n in exact.arrays}, {}, exact.symmetric)


@pytest.mark.slow
def test_few_rows_are_found_and_noise_hides_them():
    data, spec = site(150, 60)
    found = audit(data, spec, fs.AFL(), fs.Private("afl", epsilon=1.0), sites=1)
    assert of(found, "rows", "rank").value == 60
    assert of(found, "plain", "leverage").value > 0.8
    assert of(found, "plain", "membership AUC").value > 0.95
    assert of(found, "plain", "membership AUC").harm
    assert of(found, "plain", "epsilon above").value > 1.5
    assert of(found, "private", "epsilon above").value < 1.0
    noisy = audit(*site(600, 60), fs.AFL(), fs.Private("afl", epsilon=1.0), sites=1)
    assert of(noisy, "private", "membership AUC").value < of(noisy, "plain", "membership AUC").value - 0.1
    assert not of(found, "private", "noise").harm


def test_more_sites_hide_members_better():
    data, spec = site(300, 60)
    found = audit(data, spec, fs.AFL(), sites=20)
    assert of(found, "secure", "membership AUC").value < of(found, "plain", "membership AUC").value


@pytest.mark.parametrize(("broken", "arrays"), [(half, "sum, rows, gram, cross"), (exact_counts, "rows")])
def test_a_broken_mechanism_is_found(broken, arrays):
    data, spec = site(200, 8)
    found = audit(data, spec, fs.AFL(), fs.Private("afl", epsilon=4.0), mechanism=broken)
    assert of(found, "private", "noise").harm == f"too little noise on {arrays}"


def test_the_bound_stays_below_what_is_stated_in_twenty_of_twenty_runs():
    data, spec = site(400, 48)
    bounds = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        method = fs.Private("afl", epsilon=4.0)
        attack = _Attack("private", data, spec, method, 1, rng, NoisyAnswer.noised)
        bounds.append(attack._canaries()[0].value)
    assert max(bounds) <= 4.0
    assert max(bounds) >= 0.4  # a tenth of it is shown, in one run at least


def test_the_bound_is_that_of_the_binomial():
    """100 right guesses of 100: p^100 <= 0.05, so p >= 0.9705 and epsilon >= log(p / (1 - p))."""
    p = 0.05 ** (1 / 100)
    assert lower_bound(100, 100, 200, 0.0) == pytest.approx(np.log(p / (1 - p)), abs=1e-6)
    assert lower_bound(100, 50, 200, 0.0) == 0.0
    assert lower_bound(100, 100, 200, 1e-3) < lower_bound(100, 100, 200, 0.0)


def test_small_classes_and_the_command(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((90, 6)), np.array(["a"] * 50 + ["b"] * 36 + ["c"] * 4)
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y)
    told = document("audit", "--data", tmp_path / "d.npz", "--epsilon", "1", "--page", tmp_path / "a.html")
    small = next(one for one in told["findings"] if one["name"] == "small cells")
    assert small["value"] == ["c"]
    assert "sums of class c are about few rows" in (tmp_path / "a.html").read_text()
    text = fedsolve("audit", "--data", tmp_path / "d.npz").stdout
    assert "AUC" in text
    assert "private" not in text


def test_missing_values_are_filled_with_the_means_of_a_table():
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((120, 3))
    holes = rng.random(rows.shape) < 0.1
    filled = np.where(holes, np.nanmean(np.where(holes, np.nan, rows), axis=0), rows)
    labels = rng.integers(0, 2, 120)
    schema = Schema(tuple(Column(name, "number", missing="mean") for name in "abc"), label="y")
    spec = fs.LocalFederation.from_arrays(filled, labels, np.zeros(120, dtype=int)).describe()
    with_holes = fs.ClientData(np.where(holes, np.nan, rows), labels, schema=schema)
    found = audit(with_holes, spec, fs.AFL())
    assert found == audit(fs.ClientData(filled, labels, schema=schema), spec, fs.AFL())
    with pytest.raises(fs.DataError, match="without a schema"):
        audit(fs.ClientData(np.where(holes, np.nan, rows), labels, checked=True), spec, fs.AFL())
    nothing = rows.copy()
    nothing[:, 2] = np.nan
    with pytest.raises(fs.DataError, match=r"\[2\] have no value"):
        audit(fs.ClientData(nothing, labels, schema=schema), spec, fs.AFL())
