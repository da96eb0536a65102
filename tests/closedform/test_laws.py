"""The paper's route to AFL agrees with one solve of the sums; its printed signs do not."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedsolve as fs
from fedsolve.closedform import laws

RNG = np.random.default_rng(7)
X = RNG.standard_normal((300, 12))
LABELS = np.argmax(X[:, :3] + 0.5 * RNG.standard_normal((300, 3)), axis=1)
Y = np.eye(3)[LABELS]


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def test_pairwise_law_is_the_joint_solution() -> None:
    merged = laws.aggregate_pair(laws.local_solution(X[:100], Y[:100]), laws.local_solution(X[100:], Y[100:]))
    assert relative(merged.weight, np.linalg.lstsq(X, Y, rcond=None)[0]) < 1e-12


def test_the_printed_minus_sign_is_wrong() -> None:
    """Eq. 6 with a minus before its third term is off by orders of magnitude; with plus it is exact."""
    first, second = laws.local_solution(X[:100], Y[:100]), laws.local_solution(X[100:], Y[100:])
    joint = np.linalg.inv(first.gram + second.gram)

    def combine(sign: float) -> np.ndarray:
        def share(own: np.ndarray, other: np.ndarray) -> np.ndarray:
            ratio = np.linalg.inv(own) @ other
            return np.eye(12) - ratio + sign * ratio @ joint @ other

        return share(first.gram, second.gram) @ first.weight + share(second.gram, first.gram) @ second.weight

    truth = np.linalg.lstsq(X, Y, rcond=None)[0]
    assert relative(combine(1.0), truth) < 1e-12
    assert relative(combine(-1.0), truth) > 0.1


@settings(max_examples=30)
@given(
    owners=st.lists(st.integers(0, 9), min_size=300, max_size=300),
    regulariser=st.sampled_from([0.01, 1.0, 100.0]),
)
def test_any_partition_any_regulariser(owners: list[int], regulariser: float) -> None:
    """The regulariser drops out, also with clients of fewer rows than columns or none at all."""
    held = np.array(owners)
    merged = laws.aggregate(
        laws.local_solution(X[held == client], Y[held == client], regulariser) for client in range(10)
    )
    weight = laws.remove_regulariser(merged, regulariser)
    federation = fs.LocalFederation.from_arrays(X, LABELS, held, clients=10, workers=1)
    summed = fs.AFL().fit(federation).weight
    assert relative(summed, np.linalg.lstsq(X, Y, rcond=None)[0]) < 1e-11
    assert relative(weight, summed) < 1e-9


def test_one_client_is_the_identity() -> None:
    only = laws.local_solution(X, Y)
    assert laws.aggregate([only]) is only


def test_nothing_to_aggregate() -> None:
    with pytest.raises(fs.DataError, match="nothing to aggregate"):
        laws.aggregate([])
    with pytest.raises(fs.DataError, match="do not fit"):
        laws.aggregate_pair(laws.local_solution(X, Y), laws.local_solution(X[:, :5], Y))


def test_clients_of_few_rows_are_merged_by_their_pseudo_inverse() -> None:
    """Eq. 6 with R_u and R_v as pseudo-inverses, and an empty client changes nothing."""
    first, second = laws.local_solution(X[:8], Y[:8]), laws.local_solution(X[8:19], Y[8:19])
    joint = np.linalg.inv(first.gram + second.gram)

    def share(own: laws.LocalSolution, other: laws.LocalSolution) -> np.ndarray:
        ratio = np.linalg.pinv(own.gram, hermitian=True) @ other.gram
        return (np.eye(12) - ratio + ratio @ joint @ other.gram) @ own.weight

    merged = laws.aggregate_pair(first, second)
    assert relative(merged.weight, share(first, second) + share(second, first)) < 1e-9
    assert relative(merged.weight, np.linalg.lstsq(X[:19], Y[:19], rcond=None)[0]) > 0.1
    # Rows that repeat add no rank.
    twice = laws.local_solution(np.vstack([X[:4], X[:4]]), np.vstack([Y[:4], Y[:4]]))
    assert relative(twice.weight, np.linalg.lstsq(X[:4], Y[:4], rcond=None)[0]) < 1e-9
    empty = laws.local_solution(X[:0], Y[:0])
    assert relative(laws.aggregate_pair(merged, empty).weight, merged.weight) < 1e-12


def test_local_only_models() -> None:
    owners = np.arange(300) % 2
    models = laws.local_only(X, Y, owners, clients=3, ridge=0.5)
    gram = X[owners == 1].T @ X[owners == 1] + 0.5 * np.eye(12)
    assert relative(models[1], np.linalg.solve(gram, X[owners == 1].T @ Y[owners == 1])) < 1e-12
    assert not models[2].any()


@pytest.mark.slow
def test_table_a1_in_shape() -> None:
    """Full size (512 columns, 10,000 rows): about 1e-9 or less with RI for all K, exploding without."""
    path = Path(__file__).parents[2] / "examples" / "aggregation_law.py"
    spec = importlib.util.spec_from_file_location("aggregation_law", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    table = example.table_a1(rows=10_000, width=512, runs=1)
    assert list(table) == [2, 10, 20, 50, 100, 200]
    assert all(with_ri < 1e-9 for _, with_ri in table.values())
    assert max(table[2][0], table[10][0]) < 1e-9
    # The paper has 0.986 for 20 clients. Beyond that, rounding errors grow with every singular merger.
    assert 0.9 < table[20][0] < 1.1
    assert table[20][0] < table[50][0] < 1e3 < table[100][0] < table[200][0]
