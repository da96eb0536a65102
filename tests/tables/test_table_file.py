"""Data files: what is read, and that every fault is named by place."""

from __future__ import annotations

import numpy as np
import pytest

from fedsolve.errors import DataError, ModelFileError
from fedsolve.labels import labels_like
from fedsolve.tables.table_file import ColumnLayout, parts, read_table, table_kind

CSV = "a,b,label\n1,2,cat\n3.5,-4e1,dog\n5,6,cat\n"


@pytest.fixture
def write(tmp_path):
    def write(name, contents):
        path = tmp_path / name
        if isinstance(contents, dict):
            np.savez(path, **contents)
        else:
            path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
        return path

    return write


# -- npz -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("x", "y"), [("x", "y"), ("X", "Y"), ("features", "labels"), ("x_train", "y_train")])
def test_npz_arrays_are_found_by_their_usual_names(write, x, y):
    features, labels = np.arange(6.0).reshape(3, 2), np.array([0, 1, 1])
    table = read_table(write("d.npz", {x: features, y: labels}))
    assert np.array_equal(table.features, features)
    assert np.array_equal(table.labels, labels)


def test_npz_parts_are_told_apart(write):
    path = write(
        "d.npz",
        {
            "x_train": np.zeros((3, 2)),
            "y_train": [0, 1, 1],
            "x_test": np.ones((2, 2)),
            "y_test": [1, 0],
        },
    )
    assert set(parts(path)) == {"train", "test"}
    assert len(read_table(path, part="train")) == 3
    assert len(read_table(path, part="test")) == 2
    assert len(read_table(path)) == 2


def test_npz_is_decoded_column_by_column(write):
    codes = np.array([[0, 255], [10, 1]], dtype=np.uint8)
    scale, offset = np.array([0.5, 2.0], dtype=np.float32), np.array([-1.0, 3.0], dtype=np.float32)
    table = read_table(write("d.npz", {"x": codes, "y": [0, 1], "scale": scale, "offset": offset}))
    assert table.features.dtype == np.float32
    assert np.array_equal(table.features, [[-1.0, 513.0], [4.0, 5.0]])


def test_npz_keys_and_owners_can_be_named(write):
    path = write("d.npz", {"emb": np.ones((2, 3)), "cls": ["u", "v"], "site": [7, 8], "x": np.zeros((2, 3))})
    layout = ColumnLayout(features_key="emb", labels_key="cls", client="site")
    table = read_table(path, layout=layout, owned=True)
    assert table.features.sum() == 6
    assert table.labels.tolist() == ["u", "v"]
    assert table.owners.tolist() == ["7", "8"]


@pytest.mark.parametrize(
    ("arrays", "layout", "message"),
    [
        ({"z": np.ones(2)}, ColumnLayout(), "no array 'x' with features. The file has z"),
        ({"x": np.ones((2, 2))}, ColumnLayout(), "no array 'y' with labels. The file has x"),
        ({"x": np.ones((2, 2)), "y": [0, 1]}, ColumnLayout(features_key="e"), "no array 'e' with features"),
        ({"x": np.ones((2, 2)), "y": [0, 1, 1]}, ColumnLayout(), "2 rows of features but labels of shape"),
        ({"x": np.ones((2, 2, 2)), "y": [0, 1]}, ColumnLayout(), "two-dimensional"),
        ({"x": np.ones((2, 2)), "y": np.eye(2)}, ColumnLayout(), "not one-hot rows"),
        ({"x": [[1.0, np.nan]], "y": [0]}, ColumnLayout(), "nan in row 0, column 1"),
        ({"x": [[1.0], [-np.inf]], "y": [0, 1]}, ColumnLayout(), "-inf in row 1, column 0"),
        ({"x": [["a"]], "y": [0]}, ColumnLayout(), "real numbers"),
        ({"x": np.ones((0, 2)), "y": np.ones(0)}, ColumnLayout(), "no rows at all"),
        (
            {"x": np.ones((2, 2)), "y": [0, 1], "scale": np.ones(3)},
            ColumnLayout(),
            "'scale' must hold one number",
        ),
        ({"x": np.ones((2, 2)), "y": np.array([1, None])}, ColumnLayout(), "'y' holds Python objects"),
    ],
)
def test_npz_faults_are_named(write, arrays, layout, message):
    path = write("d.npz", arrays)
    with pytest.raises(DataError, match=r"d\.npz: ") as caught:
        read_table(path, layout=layout)
    assert message in str(caught.value)


def test_npz_owners_must_fit(write):
    path = write("d.npz", {"x": np.ones((2, 2)), "y": [0, 1], "site": [1, 2, 3]})
    with pytest.raises(DataError, match="2 rows but owners of shape"):
        read_table(path, layout=ColumnLayout(client="site"), owned=True)
    with pytest.raises(DataError, match="no array 'ward' with owners"):
        read_table(path, layout=ColumnLayout(client="ward"), owned=True)


@pytest.mark.parametrize("keep", [0, 10, 200, -30])
def test_damaged_npz_is_a_file_error(write, keep):
    path = write("d.npz", {"x": np.ones((20, 5)), "y": np.arange(20)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match="damaged, truncated or not an npz file"):
        read_table(path)


def test_flipped_bytes_in_an_npz_are_a_file_error(write):
    path = write("d.npz", {"x": np.ones((200, 5)), "y": np.arange(200)})
    contents = bytearray(path.read_bytes())
    contents[1000:1010] = b"0123456789"
    path.write_bytes(contents)
    with pytest.raises(ModelFileError, match="damaged"):
        read_table(path)


def test_a_single_array_and_an_unknown_kind_are_refused(tmp_path):
    np.save(tmp_path / "d.npy", np.ones((2, 2)))
    (tmp_path / "d.npy").rename(tmp_path / "d.npz")
    with pytest.raises(DataError, match="single array"):
        read_table(tmp_path / "d.npz")
    with pytest.raises(DataError, match=r"unknown kind of file '\.xlsx'"):
        read_table(tmp_path / "d.xlsx")


def test_a_folder_is_no_table(tmp_path):
    with pytest.raises(DataError, match=f"{tmp_path} is a folder: name a table in it, or folder:"):
        table_kind(tmp_path)


# -- csv -------------------------------------------------------------------------------------------


def test_csv_gives_numbers_and_text_labels(write):
    table = read_table(write("d.csv", CSV))
    assert np.array_equal(table.features, [[1, 2], [3.5, -40], [5, 6]])
    assert table.labels.tolist() == ["cat", "dog", "cat"]


@pytest.mark.parametrize(
    ("text", "layout", "labels"),
    [
        ("y,a\n1,2\n0,3\n", ColumnLayout(), [1, 0]),
        ("a,b\n1,2\n0,3\n", ColumnLayout(), [2, 3]),
        ("a,b\n1,2\n0,3\n", ColumnLayout(label="a"), [1, 0]),
        ("a,b\n1,2\n0,3\n", ColumnLayout(label="0"), [1, 0]),
        ("a,b,c\n1,2,9\n0,3,9\n", ColumnLayout(label="-2"), [2, 3]),
        ("a;b\n1;2\n0;3\n", ColumnLayout(delimiter=";"), [2, 3]),
        ("a\tb\n1\t2\n0\t3\n", ColumnLayout(delimiter="tab"), [2, 3]),
        ("a|b\n1|2\n0|3\n", ColumnLayout(delimiter="auto"), [2, 3]),
        ("1,2\n0,3\n", ColumnLayout(header=False), [2, 3]),
        ("0,1\n5,2\n6,3\n", ColumnLayout(), [2, 3]),
        ("\ufeffa,b\r\n1,2\r\n\r\n0,3\r\n", ColumnLayout(), [2, 3]),
        ("id,a,b\n77,1,2\n78,0,3\n", ColumnLayout(drop=("id",)), [2, 3]),
        (",a,b\n77,1,2\n78,0,3\n", ColumnLayout(drop=("0",)), [2, 3]),
        ('a,b\n1,"x, y"\n0,z\n', ColumnLayout(), ["x, y", "z"]),
        ("a,b\n1,1.5\n0,2\n", ColumnLayout(), [1.5, 2.0]),
        ("a,b\n1,007\n0,7\n", ColumnLayout(), ["007", "7"]),
    ],
)
def test_csv_label_column_and_dialects(write, text, layout, labels):
    table = read_table(write("d.csv", text), layout=layout)
    assert table.labels.tolist() == labels
    assert table.features.shape[1] == 1 + (layout.label == "-2")


@pytest.mark.parametrize(
    ("text", "layout", "message"),
    [
        ("", ColumnLayout(), "the file is empty"),
        ("a,label\n", ColumnLayout(), "no rows at all"),
        ("a,label\n1,x\noops,y\n", ColumnLayout(), "1 cell in column 'a' (line 3: 'oops' is not a number)"),
        ("a,label\n1,x\n\n,y\n", ColumnLayout(), "1 cell in column 'a' (line 4: it is empty)"),
        ("a,label\n1,x\nnan,y\n", ColumnLayout(), "line 3: 'nan' counts as empty"),
        ("a,label\n1,x\n-inf,y\n", ColumnLayout(), "line 3: '-inf' is infinite"),
        ("a,label\n1,x\n2,\n", ColumnLayout(), "column 'label' (line 3: it is empty)"),
        ("a,label\n1,x\n2\n", ColumnLayout(), "line 3 has 1 cells, the first line 2"),
        (CSV, ColumnLayout(label="species"), "no label column 'species'. The columns are a, b, label"),
        (CSV, ColumnLayout(label="3"), "no label column '3'"),
        (CSV, ColumnLayout(label="a", drop=("a",)), "also the client column or dropped"),
        (CSV, ColumnLayout(drop=("zip",)), "no column to drop 'zip'"),
        (CSV, ColumnLayout(label="label", drop=("0", "1")), "0 columns"),
        ("a,a,b\n1,2,3\n", ColumnLayout(label="a"), "'a' is not unique"),
        ("1,2\n3,4\n", ColumnLayout(), "the first line holds numbers (1, 2, ...)"),
        ("a;b\n1;2\n", ColumnLayout(delimiter=","), "try --delimiter ';'"),
        (CSV, ColumnLayout(delimiter=";;"), "one character"),
        (",a,b\n77,1,2\n", ColumnLayout(), "column 0 has no name"),
    ],
)
def test_csv_faults_are_named_by_line_and_column(write, text, layout, message):
    path = write("d.csv", text)
    with pytest.raises(DataError, match=r"d\.csv: ") as caught:
        read_table(path, layout=layout)
    assert message in str(caught.value)


@pytest.mark.slow
def test_csv_faults_far_down_have_the_right_line(write):
    rows = "".join(f"{k},{k % 2}\n" for k in range(9000))
    path = write("d.csv", "a,label\n" + rows + "bad,1\n")
    with pytest.raises(DataError, match="line 9002: 'bad'"):
        read_table(path)
    long = read_table(write("long.csv", "a,label\n" + rows))
    assert np.array_equal(long.features[:, 0], np.arange(9000))


def test_another_encoding_is_told_and_missing_files_are_file_errors(write, tmp_path):
    with pytest.raises(DataError, match=r"not in utf-8: byte 0xff.*--encoding cp1252"):
        read_table(write("d.csv", b"a,b\n\xff\xfe,2\n"))
    for name in ("none.csv", "none.npz", "none.parquet"):
        with pytest.raises(ModelFileError, match="No such file"):
            read_table(tmp_path / name)


def test_csv_owners_are_not_features(write):
    path = write("d.csv", "site,a,label\nnorth,1,x\nsouth,2,y\n")
    table = read_table(path, layout=ColumnLayout(client="site"), owned=True)
    assert table.owners.tolist() == ["north", "south"]
    assert table.features.shape == (2, 1)
    assert read_table(path, layout=ColumnLayout(client="site")).owners is None


def test_unlabelled_rows_are_told_from_labelled_ones_by_the_models_width(write):
    path = write("d.csv", CSV.replace("cat", "1").replace("dog", "2"))
    assert read_table(path, labelled=False, width=2).features.shape == (3, 2)
    assert read_table(path, labelled=False, width=3).features.shape == (3, 3)
    assert read_table(path, labelled=False, width=2).labels is None
    unnamed = write("e.csv", "a,b,c\n1,2,3\n")
    with pytest.raises(DataError, match="the model takes 2 features, but 3 columns are left"):
        read_table(unnamed, labelled=False, width=2)
    with pytest.raises(DataError, match="the model takes 5 features"):
        read_table(path, width=5)


# -- parquet ---------------------------------------------------------------------------------------


@pytest.fixture
def parquet(tmp_path):
    import pyarrow as arrow
    from pyarrow import parquet

    def write(**columns):
        path = tmp_path / "d.parquet"
        parquet.write_table(arrow.table(columns), path)
        return path

    return write


def test_parquet_gives_the_same_as_csv(parquet, write):
    path = parquet(a=[1.0, 3.5, 5.0], b=[2, -40, 6], label=["cat", "dog", "cat"])
    ours, theirs = read_table(path), read_table(write("d.csv", CSV))
    assert np.array_equal(ours.features, theirs.features)
    assert np.array_equal(ours.labels, theirs.labels)


def test_parquet_takes_dictionaries_and_owners(parquet):
    import pyarrow as arrow

    labels = arrow.array(["u", "v", "u"]).dictionary_encode()
    path = parquet(site=[1, 1, 2], a=[True, False, True], label=labels)
    table = read_table(path, layout=ColumnLayout(client="site"), owned=True)
    assert table.labels.tolist() == ["u", "v", "u"]
    assert table.owners.tolist() == ["1", "1", "2"]
    assert table.features.tolist() == [[1.0], [0.0], [1.0]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": [1.0, None], "label": [0, 1]}, "1 cell in column 'a' (row 1: it is empty)"),
        ({"a": [1.0, 2.0], "label": ["x", None]}, "1 cell in column 'label' (row 1: it is empty)"),
        ({"a": ["u", "v"], "label": [0, 1]}, "2 cells in column 'a' (row 0: 'u' is not a number"),
        ({"a": [1.0, float("nan")], "label": [0, 1]}, "1 cell in column 'a' (row 1: it is empty)"),
    ],
)
def test_parquet_faults_are_named(parquet, columns, message):
    with pytest.raises(DataError) as caught:
        read_table(parquet(**columns))
    assert message in str(caught.value)


def test_damaged_parquet_is_a_file_error(parquet):
    path = parquet(a=[1.0, 2.0], label=[0, 1])
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ModelFileError, match="not a parquet file"):
        read_table(path)


# -- labels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "classes", "expected"),
    [
        (["1", "2"], [1, 2, 3], [1, 2]),
        (["1.0", "2"], [1, 2, 3], [1, 2]),
        ([2, 1], ["1", "2"], ["2", "1"]),
        (["b"], ["a", "b"], ["b"]),
        ([1.0, 2.0], [1, 2], [1, 2]),
    ],
)
def test_labels_take_the_type_of_the_classes(labels, classes, expected):
    found = labels_like(np.array(labels), np.array(classes))
    assert found.tolist() == expected
    assert found.dtype == np.array(classes).dtype


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [
        (["1", "x"], [1, 2], "label 'x' in row 1 is not one of the 2 classes (1, 2)"),
        (["1", "9"], [1, 2], "label 9 in row 1"),
        ([1, 7], [1, 2], "label 7 in row 1"),
        (["c"], ["a", "b"], "label 'c' in row 0"),
        ([1.5], [1, 2], "label 1.5 in row 0"),
    ],
)
def test_unknown_labels_are_refused_by_value_and_row(labels, classes, message):
    with pytest.raises(DataError) as caught:
        labels_like(np.array(labels), np.array(classes))
    assert message in str(caught.value)
