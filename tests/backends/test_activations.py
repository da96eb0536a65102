"""Every activation against its formula."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

import fedsolve as fs
from fedsolve.backends.activations import ACTIVATIONS, activate

FORMULAS = {
    "none": lambda x: x,
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "gelu_erf": lambda x: x * norm.cdf(x),
    "relu": lambda x: np.where(x > 0, x, 0.0),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "tanh": lambda x: (1 - np.exp(-2 * np.abs(x))) / (1 + np.exp(-2 * np.abs(x))) * np.sign(x),
    "hardswish": lambda x: np.where(x <= -3, 0.0, np.where(x >= 3, x, x * (x + 3) / 6)),
    "softshrink": lambda x: np.where(x > 0.5, x - 0.5, np.where(x < -0.5, x + 0.5, 0.0)),
    "sigmoid": lambda x: np.where(x > 0, 1 / (1 + np.exp(-np.abs(x))), 1 - 1 / (1 + np.exp(-np.abs(x)))),
}


def test_every_activation_has_a_formula_here():
    assert FORMULAS.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", FORMULAS)
def test_formula(name, dtype):
    """Within a few roundings of the dtype, on more values than one cache block holds."""
    edges = [-40.0, -3.0, -0.5, -1e-8, -0.0, 0.0, 1e-8, 0.5, 3.0, 40.0]
    values = np.concatenate([edges, np.linspace(-12.0, 12.0, 99_990)]).astype(dtype).reshape(1000, 100)
    expected = FORMULAS[name](values.astype(np.float64))
    found = activate(name, values.copy())
    assert found.dtype == np.dtype(dtype)
    eps = np.finfo(dtype).eps
    assert np.all(np.abs(found - expected) <= 8 * eps * np.maximum(1.0, np.abs(values)))


@pytest.mark.parametrize(
    ("name", "value", "result"),
    [
        ("gelu", 1.0, 0.8411919906082768),
        ("gelu_erf", 1.0, 0.8413447460685429),
        ("leaky_relu", -2.0, -0.02),
        ("tanh", 1.0, 0.7615941559557649),
        ("hardswish", 1.0, 2 / 3),
        ("softshrink", -2.0, -1.5),
        ("sigmoid", 1.0, 0.7310585786300049),
    ],
)
def test_known_values(name, value, result):
    """To the last digits, as any calculator gives them."""
    assert np.isclose(activate(name, np.array([value]))[0], result, rtol=1e-15, atol=0)


@pytest.mark.parametrize("name", FORMULAS)
def test_in_place_for_any_shape(name):
    for shape in [(0, 5), (1, 1), (3, 4), (7,), (2, 3, 4)]:
        values = np.random.default_rng(0).standard_normal(shape)
        expected = FORMULAS[name](values.copy())
        assert activate(name, values) is values
        assert np.allclose(values, expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_large_values_stay_finite(name, dtype):
    assert np.isfinite(activate(name, np.array([-1e4, 1e4], dtype=dtype))).all()


def test_an_unknown_activation_is_refused_by_name():
    with pytest.raises(fs.DataError, match=r"unknown activation 'swish'.*gelu, gelu_erf"):
        activate("swish", np.zeros(3))
    with pytest.raises(fs.DataError, match=r"activation must be 'none', .*got 'swish'"):
        fs.DeepAFL(activation="swish")
