"""Regressions as ONNX files: what onnxruntime gives is what `predict` gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from tests.statistics.tables import federation, table

onnxruntime = pytest.importorskip("onnxruntime")

MODELS: dict[str, Any] = {
    "interactions": fs.GLM(
        "cens ~ age*C(tgrade) + log(tsize) + I(pnodes**2) + I(age>50) + C(horTh, Treatment('yes')):menostat",
        family="binomial",
    ),
    "probit": fs.GLM("cens ~ scale(age) + tgrade + C(horTh, Sum)", family="binomial", link="probit"),
    "cloglog": fs.GLM("cens ~ `my age` + center(age) + log10(tsize)", family="binomial", link="cloglog"),
    "offset": fs.GLM("estrec ~ sqrt(age) + offset(log(time))", family="poisson"),
    "no intercept": fs.GLM("time ~ 0 + horTh + cens - 1"),
    "functions": fs.GLM("time ~ log1p(pnodes) + expm1(age / 100) + I(pnodes != 1) + minimum(age, 60)"),
    "inverse squared": fs.GLM("time ~ age", family="inverse-gaussian"),
    "filled": fs.GLM("time ~ age + tgrade", missing="schema"),
    "cox": fs.Cox("Surv(time, cens) ~ age + tgrade"),
    "mixed": fs.MixedModel("time ~ age + tgrade"),
}


def session(model: Any, path: Path) -> Any:
    model.to_onnx(path)
    return onnxruntime.InferenceSession(path)


def fed(found: Any, frame: Any) -> dict[str, Any]:
    texts = {each.name: each.type == "tensor(string)" for each in found.get_inputs()}
    return {
        name: (frame[name].astype(str).to_numpy(object) if text else frame[name].to_numpy(float))[:, None]
        for name, text in texts.items()
    }


@pytest.mark.filterwarnings("ignore::fedsolve.ConditionWarning")
@pytest.mark.parametrize("name", sorted(MODELS))
def test_onnxruntime_predicts_as_the_model_does(name: str, tmp_path: Path) -> None:
    frame = table("gbsg2").assign(**{"my age": table("gbsg2").age ** 2})
    model = MODELS[name].fit(federation(frame, 3))
    found = session(model, tmp_path / "m.onnx")
    assert name == "offset" or "time" not in {each.name for each in found.get_inputs()}
    given = found.run(None, fed(found, frame))[0][:, 0]
    np.testing.assert_allclose(given, model.predict(frame), rtol=1e-9, atol=1e-13)


def test_unknown_categories_and_logarithms_of_zero_fail(tmp_path: Path) -> None:
    frame = table("gbsg2")
    found = session(
        fs.GLM("cens ~ log(age) + tgrade", family="binomial").fit(federation(frame, 3)), tmp_path / "m"
    )
    for change, match in (({"tgrade": "IV"}, "no category"), ({"age": 0.0}, "what the formula makes")):
        with pytest.raises(Exception, match=match):
            found.run(None, fed(found, frame.head(3).assign(**change)))


def test_what_has_no_form_in_onnx_is_named(tmp_path: Path) -> None:
    model = fs.GLM("cens ~ I(age % 7)", family="binomial").fit(federation(table("gbsg2"), 3))
    with pytest.raises(fs.DataError, match=r"'I\(age % 7\)' has no form in ONNX"):
        model.to_onnx(tmp_path / "m.onnx")
    curves = fs.KaplanMeier("time", "cens").fit(federation(table("gbsg2"), 3))
    with pytest.raises(fs.DataError, match="holds a result and predicts nothing"):
        curves.to_onnx(tmp_path / "m.onnx")
