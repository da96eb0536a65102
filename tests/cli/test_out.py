"""Where --out leads: through links, never over devices, and nothing that was there is lost."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import fedsolve as fs
from tests.command import fedsolve, refused


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    rng = np.random.default_rng(1)
    x = rng.normal(size=(60, 3))
    pd.DataFrame(x, columns=list("abc")).assign(ill=np.where(x[:, 0] > 0, "yes", "no")).to_csv(
        folder / "rows.csv", index=False
    )
    return folder / "rows.csv"


def trained(rows, out, ridge=1):
    return fedsolve("train", rows, "--method", "afl", "--ridge", ridge, "--clients", 2, "--out", out)


def test_a_link_stays_and_what_it_names_is_written(rows, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real.safetensors")
    assert trained(rows, tmp_path / "link").exit_code == 0
    assert (tmp_path / "link").is_symlink()
    assert fs.load_model(tmp_path / "real.safetensors").features == 3


def test_what_is_no_regular_file_is_refused_before_training(rows):
    refused(trained(rows, "/dev/full"), 4, "cannot write /dev/full: it is no regular file")
    with pytest.raises(fs.ModelFileError, match="it is no regular file"):
        fs.container.write_atomically("/dev/full", b"")


def test_the_model_before_is_kept_as_the_schema_before_is(rows, tmp_path):
    out = tmp_path / "m.safetensors"
    assert trained(rows, out).exit_code == 0
    first = out.read_bytes()
    assert trained(rows, out, ridge=2).exit_code == 0
    assert (tmp_path / "m.safetensors.previous").read_bytes() == first
    assert out.read_bytes() != first


def test_training_without_out_says_so_before_it_starts(rows):
    result = fedsolve("train", rows, "--method", "afl", "--ridge", 1, "--clients", 2, "--no-calibrate")
    assert result.exit_code == 0
    assert result.stderr == "the model is not kept; name a file with --out to keep it.\n"


def test_a_folder_that_is_not_there_is_named(rows, tmp_path):
    trained(rows, tmp_path / "m")
    for source in ("no-folder", "no-folder/", "folder:no-folder"):
        refused(fedsolve("predict", tmp_path / "m", source), 4, "no-folder", "No such file or folder")


@pytest.mark.parametrize(
    "labels", [["a", None, "b", "a"], ["a", np.nan, "b", "a"], pd.array(["a", pd.NA, "b", "a"])]
)
def test_missing_labels_are_named_by_row(labels):
    with pytest.raises(fs.DataError, match=r"1 labels are missing \(rows 1\)"):
        fs.LocalFederation.from_arrays(np.eye(4), labels, np.arange(4) % 2)


def test_a_model_takes_the_dataframe_that_its_federation_took(rows):
    frame = pd.read_csv(rows)
    x, y = frame[list("abc")], frame["ill"]
    federation = fs.LocalFederation.from_arrays(x, y, np.arange(60) % 3)
    for model in (
        fs.AFL(ridge=1.0).fit(federation),
        fs.AFL(ridge=1.0).fit(fs.privacy.SecureFederation(federation)),
    ):
        assert model.score(x, y) == model.score(x[list("cab")], y) == model.score(x.to_numpy(), y)
        with pytest.raises(fs.DataError, match="column 'c' is missing"):
            model.predict(x[list("ab")])
