"""scikit-learn pipelines with our estimators, converted whole by skl2onnx and run by onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import VotingClassifier
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import fedsolve as fs

pytestmark = pytest.mark.onnx
pd = pytest.importorskip("pandas")
skl2onnx = pytest.importorskip("skl2onnx")
runtime = pytest.importorskip("onnxruntime")

from skl2onnx.common.data_types import DoubleTensorType, FloatTensorType, StringTensorType  # noqa: E402

from fedsolve.export import register_converters  # noqa: E402

NEAR = {"float64": 1e-9, "float32": 1e-5}
TENSORS = {"float64": DoubleTensorType, "float32": FloatTensorType}
NUMBERS, WORDS = ["age", "pressure", "dose"], ["sex", "ward"]


def patients(rows: int, seed: int) -> tuple[Any, Any]:
    """A table with numbers, of which some are missing, and words; and whether each patient is ill."""
    rng = np.random.default_rng(seed)
    ill = rng.random(rows) < 0.4
    table = pd.DataFrame(
        {
            "age": rng.normal(50, 10, rows) + 8 * ill,
            "pressure": rng.normal(130, 15, rows) + 10 * ill,
            "dose": rng.exponential(2.0, rows),
            "sex": np.where(rng.random(rows) < 0.3 + 0.3 * ill, "F", "M"),
            "ward": rng.choice(["north", "south", "west"], rows),
        }
    )
    # Both precisions are given the same numbers: what float32 cannot hold is no matter of the conversion.
    table[NUMBERS] = table[NUMBERS].astype("float32").astype("float64")
    table.loc[rng.random(rows) < 0.1, "age"] = np.nan
    return table, np.where(ill, "ill", "well")


def given(precision: str, rows: int = 300, seed: int = 1) -> tuple[Any, Any]:
    """The same, without missing values where they cannot be filled in."""
    table, ill = patients(rows, seed)
    return (table if precision == "float32" else table.fillna(50.0)), ill


TABLE, ILL = given("float64")
NEW, _ = given("float64", 200, 2)


def whole(estimator: Any, precision: str = "float64") -> Any:
    """From the table to the estimator; onnxruntime has no kernel that imputes doubles."""
    filling = [SimpleImputer()] if precision == "float32" else []
    numbers = make_pipeline(*filling, StandardScaler())
    words = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    return make_pipeline(ColumnTransformer([("n", numbers, NUMBERS), ("w", words, WORDS)]), estimator)


def converted(pipeline: Any, precision: str, **more: Any) -> Any:
    register_converters()
    inputs = [(name, TENSORS[precision]([None, 1])) for name in NUMBERS]
    inputs += [(name, StringTensorType([None, 1])) for name in WORDS]
    return skl2onnx.to_onnx(pipeline, initial_types=inputs, **more)


def ran(proto: Any, precision: str, table: Any = NEW) -> list[Any]:
    session = runtime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    cells = {name: table[[name]].to_numpy().astype(precision) for name in NUMBERS}
    cells |= {name: table[[name]].to_numpy().astype(object) for name in WORDS}
    return list(session.run(None, cells))


CLASSIFIERS = {
    "afl": lambda: fs.AFLClassifier(ridge=1.0),
    "afl uncalibrated": lambda: fs.AFLClassifier(ridge=1.0, calibrate=False),
    "deep": lambda: fs.DeepAFLClassifier(layers=3, width=64, ridge=1.0, random_state=0),
    "softmax": lambda: fs.SoftmaxClassifier(ridge=1.0),
    "kernel": lambda: fs.KernelAFLClassifier(landmarks=60),
    "auto": lambda: fs.AutoClassifier(methods="softmax"),
}


@pytest.mark.parametrize("precision", NEAR)
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_pipeline_from_a_raw_table_to_probabilities(name: str, precision: str) -> None:
    pipeline = whole(CLASSIFIERS[name](), precision).fit(*given(precision))
    proto = converted(pipeline, precision, options={"zipmap": False})
    new, _ = given(precision, 200, 2)
    label, probabilities = ran(proto, precision, new)
    expected = pipeline.predict_proba(new)
    assert probabilities.dtype == precision
    np.testing.assert_allclose(probabilities, expected, rtol=0, atol=NEAR[precision])
    clear = np.abs(expected[:, 0] - expected[:, 1]) > 10 * NEAR[precision]
    assert clear.mean() > 0.9
    assert np.array_equal(label[clear], pipeline.predict(new)[clear])


@pytest.mark.parametrize("precision", NEAR)
@pytest.mark.parametrize("kind", ["AFLRegressor", "DeepAFLRegressor"])
def test_a_regression(kind: str, precision: str) -> None:
    pipeline = whole(getattr(fs, kind)()).fit(TABLE, TABLE["pressure"] + TABLE["dose"] ** 2)
    (found,) = ran(converted(pipeline, precision), precision)
    expected = pipeline.predict(NEW)
    np.testing.assert_allclose(found[:, 0], expected, rtol=0, atol=NEAR[precision] * np.abs(expected).max())


def test_labels_as_numbers_in_maps_and_two_of_ours_side_by_side() -> None:
    both = VotingClassifier(
        [("a", fs.AFLClassifier(ridge=1.0)), ("d", fs.DeepAFLClassifier(layers=1, width=16, ridge=1.0))],
        voting="soft",
        flatten_transform=False,
    )
    pipeline = whole(both).fit(TABLE, np.where(ILL == "ill", 7, 3))
    label, probabilities = ran(converted(pipeline, "float64", options={"zipmap": False}), "float64")
    np.testing.assert_allclose(probabilities, pipeline.predict_proba(NEW), rtol=0, atol=1e-9)
    assert label.tolist() == pipeline.predict(NEW).tolist()
    single = whole(fs.AFLClassifier(ridge=1.0), "float32").fit(TABLE, ILL == "ill")
    label, maps = ran(converted(single, "float32"), "float32")  # onnxruntime makes no maps of doubles
    assert label.tolist() == single.predict(NEW).astype(int).tolist()
    expected = single.predict_proba(NEW)
    np.testing.assert_allclose([[one[0], one[1]] for one in maps], expected, rtol=0, atol=1e-5)


def test_what_cannot_be_converted_says_so() -> None:
    pipeline = whole(fs.AFLClassifier(ridge=1.0))
    pipeline.fit(TABLE, ILL)
    with pytest.raises(fs.DataError, match=r"need opset 18; pass target_opset=20 instead of 15"):
        converted(pipeline, "float64", target_opset=15)
