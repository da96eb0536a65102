"""Descriptions against pandas on the pooled rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas
import pytest

import fedsolve as fs
from fedsolve import Describe
from fedsolve.federation.messages import Request
from fedsolve.federation.participant import Memory, kind_of
from fedsolve.privacy import SecureFederation
from fedsolve.statistics.describe import QUANTILES, rounded
from fedsolve.testing import check_method
from tests.statistics.tables import federation, near, schema_of, table


def rows() -> Any:
    frame = table("gbsg2").copy()
    frame.loc[::7, "age"] = np.nan
    frame.loc[::14, "tsize"] = np.nan
    return frame


@pytest.mark.parametrize("sites", [1, 5, 50])
def test_moments_are_exact_and_quantiles_within_their_bin(sites: int) -> None:
    frame = rows()
    model = Describe().fit(federation(frame, sites))
    lines = {line["column"]: line for line in model.records()}
    for name in frame.select_dtypes("number"):
        line = lines[name]
        near(
            [line["rows"], line["mean"], line["sd"]],
            [frame[name].count(), frame[name].mean(), frame[name].std()],
            1e-9,
        )
        assert line["missing"] == frame[name].isna().sum()
        exact = frame[name].quantile(QUANTILES, interpolation="lower").to_numpy()
        upper = frame[name].quantile(QUANTILES, interpolation="higher").to_numpy()
        found, within = np.array(line["quantiles"]), np.array(line["within"])
        assert np.all(found >= exact - within)
        assert np.all(found <= upper + within)
        assert sum(line["bins"]) == line["rows"]
        assert len(line["bins"]) <= 20
    for name in ("horTh", "tgrade"):
        assert lines[name]["categories"] == frame[name].value_counts().sort_index().to_dict()
    near(model.tables["correlation"], frame[list(model.names)].corr(), 1e-9)
    assert model.facts["complete_rows"] == len(frame.dropna())
    both = int((frame.age.isna() & frame.tsize.isna()).sum())
    places = [list(lines).index(name) for name in ("age", "tsize")]
    assert model.tables["gaps"][places[0], places[1]] == both
    counts = {
        "none of them": len(frame.dropna()),
        "age": int(frame.age.isna().sum()) - both,
        "age, tsize": both,
    }
    assert {each["missing"]: each["rows"] for each in model.patterns} == counts
    assert "Missing together" in str(model)
    assert model.document()["patterns"] == model.patterns


def test_quantiles_have_the_digits_that_their_bins_allow() -> None:
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({"ill": (rng.random(3000) < 0.4).astype(float), "days": rng.poisson(6, 3000)})
    frame["capped"] = np.minimum(rng.exponential(size=3000), 1.0)
    frame = frame.assign(same=3.7, tiny=1e-20 * rng.normal(size=3000))
    columns = [fs.Column(name, **({"bounds": (0, 1)} if name == "capped" else {})) for name in frame]
    model = Describe().fit(federation(frame, 3, fs.Schema(tuple(columns))))
    lines = {line["column"]: line for line in model.records()}
    for name in ("ill", "days"):
        exact = frame[name].quantile(QUANTILES, interpolation="inverted_cdf")
        assert lines[name]["quantiles"] == exact.tolist()
    assert lines["capped"]["quantiles"][-1] == 1
    near(lines["same"]["quantiles"], [3.7] * 5, 1e-12)
    near(lines["tiny"]["quantiles"], frame.tiny.quantile(QUANTILES), 0.2)
    assert model.remarks == ["quantiles are exact to a bin, of up to about 0.04 standard deviations."]
    assert model.remarks[0] in str(model)


@pytest.mark.parametrize(("low", "high", "found"), [(0.9, 1.1, 1.0), (0.23, 0.28, 0.24), (31.0, 44.0, 40.0)])
def test_a_rounded_quantile_stays_in_its_bin(low: float, high: float, found: float) -> None:
    given = (low + 0.2 * (high - low), low, high)
    assert rounded(*(np.array([each]) for each in given)).tolist() == [found]


def test_dates_are_printed_as_dates() -> None:
    days = np.arange(408) % 102
    frame = pandas.DataFrame({"came": pandas.Timestamp("2024-03-01") + pandas.to_timedelta(days, "D")})
    frame = frame.assign(arm=np.where(days <= 50, "early", "late"), y=np.arange(408) % 7)
    columns = (fs.Column("came", "date", reference=19000), *schema_of(frame[["arm", "y"]]).columns)
    rows = federation(frame, 4, fs.Schema(columns))
    line, *_ = Describe(by="arm").fit(rows).records()
    assert line["mean"] in ("2024-04-20", "2024-04-21")
    assert line["sd"] == f"{days.std(ddof=1):.4g} days"
    gaps = pandas.to_datetime(line["quantiles"]) - pandas.Timestamp("2024-03-01")
    assert np.all(np.abs(gaps.days - np.array([5, 25, 50, 76, 96])) <= np.array(line["within"]) + 1)
    groups = Describe(by="arm").fit(rows).groups
    assert [group["means"]["came"] for group in groups] == ["2024-03-26", "2024-05-16"]
    assert line["mean"] in Describe().fit(rows).page()
    model = fs.GLM("y ~ came").fit(rows)
    assert model.facts["units"] == {"came": "years since 2022-01-08"}
    assert "came years since 2022-01-08" in str(model)


def test_groups_and_sites_of_ten_rows_and_more() -> None:
    frame = rows().reset_index(drop=True)
    frame["tgrade"] = frame.tgrade.where((frame.tgrade != "I") | (frame.index % 9 == 0), "II")
    few = int((frame.tgrade == "I").sum())
    assert 0 < few < 10
    groups = {group["group"]: group for group in Describe(by="tgrade").fit(federation(frame)).groups}
    assert groups["I"] == {"group": "I", "rows": None}
    kept = frame[frame.tgrade != "I"]  # a mean over all rows would tell that of the few
    whole = {line["column"]: line for line in Describe(by="tgrade").fit(federation(frame)).records()}
    near([whole["time"]["rows"], whole["time"]["mean"]], [len(kept), kept.time.mean()], 1e-9)
    assert whole["menostat"]["categories"] == kept.menostat.value_counts().sort_index().to_dict()
    told = Describe(by="tgrade").fit(federation(frame))
    assert "Means by group" in str(told)
    assert told.document()["groups"][0] == {"group": "I", "rows": None}
    assert told.caveat is None
    near(groups["III"]["means"]["pnodes"], frame[frame.tgrade == "III"].pnodes.mean(), 1e-9)
    owners = np.arange(len(frame)) % 3
    sites = Describe(by="site").fit(federation(frame, owners)).groups
    near(sites[1]["means"]["time"], frame[owners == 1].time.mean(), 1e-9)


def test_secure_sums_change_nothing() -> None:
    plain, secure = Describe().fit(federation(rows())), Describe().fit(SecureFederation(federation(rows())))
    for one, other in zip(plain.records(), secure.records(), strict=True):
        near([other.get("mean", 1), other.get("sd", 1)], [one.get("mean", 1), one.get("sd", 1)], 1e-9)


def test_the_page_has_a_picture_of_every_column(tmp_path: Any) -> None:
    model = Describe(by="horTh").fit(federation(rows()))
    page = model.page()
    assert page.count("<svg") == len(model.names)
    assert "Missing together" in page
    model.save(tmp_path / "d.safetensors")
    assert fs.load_model(tmp_path / "d.safetensors").page() == page


def test_columns_of_few_or_no_rows_do_not_coarsen_the_others() -> None:
    frame = table("gbsg2").assign(nothing=np.nan, few=np.where(np.arange(686) < 25, np.arange(686.0), np.nan))
    lines = {line["column"]: line for line in Describe().fit(federation(frame)).records()}
    assert lines["nothing"]["mean"] is None
    assert lines["nothing"]["quantiles"] == [None] * 5
    assert len(lines["few"]["bins"]) == 2
    assert sum(lines["few"]["bins"]) == 25
    assert len(lines["time"]["bins"]) == 20
    assert abs(lines["time"]["quantiles"][2] - frame.time.median()) <= lines["time"]["within"][2] < 120
    assert "nothing" in Describe().fit(federation(frame)).page()


def test_what_is_refused() -> None:
    with pytest.raises(fs.DataError, match="every group of 'site' has fewer than 10 rows"):
        Describe(by="site").fit(federation(table("gbsg2").head(20), 4))
    with pytest.raises(fs.DataError, match="no column 'grade'"):
        Describe(by="grade").fit(federation(rows()))
    request = Request(
        "describe-counts", 0, 0, (), {"rows": 686, "gaps": [], "large": [True]}, {"edges": np.zeros((640, 7))}
    )
    client = federation(rows(), 1).participants[0]
    with pytest.raises(fs.DataError, match="641 bins are asked for"):
        kind_of("describe-counts").step(client.data, request, Memory())


def test_laws() -> None:
    check_method(Describe)


def test_secure_sums_describe_no_single_site():
    features = np.random.default_rng(0).normal(size=(240, 2))
    labels, owners = (features[:, 0] > 0).astype(int), np.arange(240) % 4
    federation = fs.LocalFederation.from_arrays(features, labels, owners)
    with pytest.raises(fs.FedsolveError, match="tells each site's own sums, which secure sums hide"):
        fs.Describe(by="site").fit(fs.privacy.SecureFederation(federation))


def test_of_few_rows_no_quantiles_are_told() -> None:
    (line, *_) = Describe().fit(federation(rows().tail(6), 2)).records()
    assert line["mean"] is not None
    assert line["quantiles"] == [None] * len(QUANTILES)
