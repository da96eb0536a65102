"""Random projections: the documented bits, on every side, whatever made them."""

from __future__ import annotations

import hashlib
from itertools import combinations

import numpy as np
import pytest
from scipy.stats import kstest

import fedsolve as fs
from fedsolve import version
from fedsolve.closedform.projections import fingerprint, projection
from fedsolve.federation.participant import Participant
from tests import oracle

CASES = [
    # seed, role, layer, inputs, outputs, gain
    (0, "zero", 0, 64, 256, 1.0),
    (0, "hidden", 0, 256, 256, 1.0),
    (0, "hidden", 19, 31, 7, 1.0),
    (123456789012345678901234567890, "hidden", 3, 5, 2, 4.0),
    (-1, "zero", 0, 1, 1, 0.1),
]


def philox(key: int, count: int) -> list[int]:
    """Philox 4x64-10 (Salmon et al., SC 2011) in Python integers, counting from 1 as numpy does."""
    mask = 2**64 - 1
    numbers: list[int] = []
    block = 0
    while len(numbers) < count:
        block += 1
        a, b, c, d = block, 0, 0, 0
        low, high = key & mask, key >> 64
        for _ in range(10):
            left, right = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
            a, b, c, d = (right >> 64) ^ b ^ low, right & mask, (left >> 64) ^ d ^ high, left & mask
            low, high = (low + 0x9E3779B97F4A7C15) & mask, (high + 0xBB67AE8584CAA73B) & mask
        numbers += [a, b, c, d]
    return numbers[:count]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_bits_as_an_independent_generator(case):
    made = projection(*case)
    weight, bias = oracle.random_map(*case)
    assert made.weight.shape == (case[3], case[4])
    assert made.bias.shape == (case[4],)
    assert made.weight.tobytes() == weight.tobytes()
    assert made.bias.tobytes() == bias.tobytes()


@pytest.mark.parametrize("case", [CASES[2], CASES[3], CASES[4]], ids=str)
def test_same_bits_as_the_generator_written_out(case):
    seed, role, layer, inputs, outputs, gain = case
    name = f"fedsolve projection 1|{seed}|{role}|{layer}|{inputs}|{outputs}"
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    scale = gain / float(inputs) ** 0.5
    values = [
        (2.0 * ((number >> 11) / 2.0**53) - 1.0) * scale for number in philox(key, (inputs + 1) * outputs)
    ]
    made = projection(*case)
    assert [*made.weight.reshape(-1).tolist(), *made.bias.tolist()] == values


@pytest.mark.parametrize(
    ("case", "digest"),
    [
        (CASES[0], "dea9aacf6e9af03d"),
        (CASES[1], "decb3b700e2e5c32"),
        (CASES[2], "7d218365825867b9"),
        (CASES[3], "abd4ee35d86bb804"),
    ],
    ids=str,
)
def test_golden_bits(case, digest):
    """First 16 hexadecimal digits of SHA-256 over weight and bias, made by:

    import hashlib, numpy as np
    for seed, role, layer, n, m, gain in CASES[:4]:
        name = f"fedsolve projection 1|{seed}|{role}|{layer}|{n}|{m}"
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
        u = (np.random.Philox(key=key).random_raw((n + 1) * m) >> np.uint64(11)) / 2.0**53
        values = (2.0 * u - 1.0) * (gain / np.sqrt(n))
        print(hashlib.sha256(values.astype("<f8").tobytes()).hexdigest()[:16])
    """
    made = projection(*case)
    bits = made.weight.astype("<f8").tobytes() + made.bias.astype("<f8").tobytes()
    assert hashlib.sha256(bits).hexdigest()[:16] == digest


@pytest.mark.parametrize("gain", [0.5, 1.0, 4.0])
def test_entries_are_uniform_within_the_bound(gain):
    made = projection(7, "hidden", 2, 300, 200, gain)
    bound = gain / np.sqrt(300)
    values = np.concatenate([made.weight.reshape(-1), made.bias])
    assert np.abs(values).max() <= bound
    assert np.abs(values).max() > 0.999 * bound
    assert kstest(values, "uniform", args=(-bound, 2 * bound)).pvalue > 0.01
    assert np.isclose(values.var(), bound**2 / 3, rtol=0.02)


def test_gain_only_scales():
    one, four = projection(3, "hidden", 1, 50, 20, 1.0), projection(3, "hidden", 1, 50, 20, 4.0)
    assert np.array_equal(four.weight, 4.0 * one.weight)
    assert np.array_equal(four.bias, 4.0 * one.bias)


def test_every_part_of_the_name_gives_another_stream():
    made = [
        projection(*name, 40, 30).weight.reshape(-1)
        for name in [(0, "zero", 0), (0, "hidden", 0), (0, "hidden", 1), (1, "hidden", 0), (10, "hidden", 1)]
    ]
    for first, second in combinations(made, 2):
        assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(1200)


def test_float32_is_the_rounded_float64():
    exact, rounded = projection(3, "hidden", 1, 50, 20), projection(3, "hidden", 1, 50, 20, dtype="float32")
    assert rounded.weight.dtype == rounded.bias.dtype == np.float32
    assert np.array_equal(rounded.weight, exact.weight.astype(np.float32))
    assert np.array_equal(rounded.bias, exact.bias.astype(np.float32))


def test_a_projection_cannot_be_changed_by_one_of_its_users():
    made = projection(3, "hidden", 1, 50, 20)
    for array in (made.weight, made.bias):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0.0


def test_apply_is_affine():
    made = projection(3, "hidden", 1, 50, 20)
    rows = np.random.default_rng(0).standard_normal((9, 50))
    out = np.empty((9, 20))
    assert made.apply(rows, out) is out
    assert np.allclose(out, rows @ made.weight + made.bias[None, :], rtol=1e-14, atol=1e-14)


# -- both sides must make the same bits ------------------------------------------------------------


def test_fingerprint_is_a_hash_of_a_small_projection():
    for seed in (0, 1, -5):
        weight, bias = oracle.random_map(seed, "fingerprint", 0, 7, 9)
        assert fingerprint(seed) == hashlib.sha256(weight.tobytes() + bias.tobytes()).hexdigest()[:32]
    assert fingerprint(0) != fingerprint(1)


@pytest.mark.parametrize(
    "agreement",
    [
        {"projection_scheme": version.PROJECTIONS, "fingerprint": "0" * 32},
        {"projection_scheme": version.PROJECTIONS + 1, "fingerprint": fingerprint(0)},
        {},
    ],
    ids=["other bits", "other scheme", "none given"],
)
@pytest.mark.parametrize("kind", [fs.DeepAFL, fs.Cascade])
def test_a_mismatch_is_refused(digits, monkeypatch, kind, agreement):
    monkeypatch.setattr(kind, "agreement", lambda self: agreement)
    data = digits.head(50)
    participant = Participant("one", fs.ClientData(data.features, data.labels))
    federation = fs.LocalFederation([participant])
    method = kind(layers=1, width=8)
    request = method.start(federation.describe()).request(federation.clients)
    with pytest.raises(fs.TermError, match="the random projections differ"):
        participant.answer(request)
    with pytest.raises(fs.CohortError, match=r"'one'.*the random projections differ"):
        method.fit(federation)
