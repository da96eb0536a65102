"""What the engine on Ray is made of, without Ray: the tree, packets, workers, and where rows are."""

from __future__ import annotations

import os
import pickle
import socket
from pathlib import Path

import numpy as np
import pytest

import fedsolve as fs
from fedsolve import cluster
from fedsolve.cluster import check_address, ray_federation, row_file
from fedsolve.cluster.crew import gpu_share
from fedsolve.cluster.lanes import LANES, SumTree, in_lanes, shares
from fedsolve.cluster.row_file import file_of
from fedsolve.cluster.worker import Seen, Worker
from fedsolve.data.parquet_rows import FileStamp
from fedsolve.errors import CohortError, DataError, TermError
from fedsolve.experiments.cells import train_cell
from fedsolve.experiments.reading import read_experiment
from fedsolve.experiments.sources import ExperimentRows
from fedsolve.federation.messages import Needs, Term
from tests.command import fedsolve, refused
from tests.toy import RANDOM, opening, written

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def terms(places: int) -> list[Term]:
    rng = np.random.default_rng(0)
    return [
        Term({"a": rng.standard_normal(5) * 10.0 ** rng.integers(-9, 9)}, {"n": 1}) for _ in range(places)
    ]


@pytest.mark.parametrize("places", [1, 2, 3, 7, 64, 101])
def test_the_tree_gives_the_same_bits_whoever_adds_what(places: int):
    rng = np.random.default_rng(places)
    found = []
    for workers in (1, 2, 5):
        whole = SumTree(places)
        at = np.array(shares([1 + place % 7 for place in range(places)], workers))
        for worker in rng.permutation(workers):
            part = SumTree(places)
            for place in rng.permutation(np.flatnonzero(at == worker)):
                part.add(0, int(place), terms(places)[place])
            for node in part.nodes():
                whole.add(*node)
        ((_, _, root),) = whole.nodes()
        assert root.counts == {"n": places}
        found.append(root.arrays["a"])
    assert all(np.array_equal(array, found[0]) for array in found)
    assert np.allclose(found[0], sum(term.arrays["a"] for term in terms(places)), rtol=1e-12)


def test_a_tree_refuses_terms_unlike_each_other_and_passes_over_clients_without_rows():
    tree = SumTree(2)
    tree.add(0, 0, Term({"a": np.ones(2)}))
    with pytest.raises(TermError, match="do not fit"):
        tree.add(0, 1, Term({"a": np.ones(3)}))
    tree = SumTree(3)
    for place, term in enumerate((Term(), Term({"a": np.ones(2)}), Term(counts={"rows": 0}))):
        tree.add(0, place, term)
    ((_, _, root),) = tree.nodes()
    assert root.arrays["a"].tolist() == [1, 1]


def test_lanes_are_runs_with_about_as_many_rows_and_of_one_machine():
    batches = [(f"{number:04d}",) for number in range(1000)]
    few = in_lanes(batches[:LANES], lambda name: 1, lambda name: None)
    assert few == [(number, [batch]) for number, batch in enumerate(batches[:LANES])]
    sizes = {name: 1 + 99 * (number < 100) for number, (name,) in enumerate(batches)}
    lanes = in_lanes(batches, sizes.__getitem__, lambda name: None)
    assert [batch for _, lane in lanes for batch in lane] == batches
    assert [number for number, _ in lanes] == list(range(len(lanes)))
    rows = [sum(sizes[name] for (name,) in lane) for _, lane in lanes]
    assert max(rows) <= sum(sizes.values()) / LANES + max(sizes.values())
    machines = {name: "north" if number < 777 else "south" for number, (name,) in enumerate(batches)}
    for _, lane in in_lanes(batches, sizes.__getitem__, machines.__getitem__):
        assert len({machines[name] for (name,) in lane}) == 1
    # With 2, 4, 8 and so on workers each has one part of the tree.
    for workers in (2, 4, 8, 16):
        trees = {worker: SumTree(LANES) for worker in range(workers)}
        for place, worker in enumerate(shares([1] * LANES, workers)):
            trees[worker].add(0, place, Term(counts={"n": 1}))
        assert all(len(tree.nodes()) == 1 for tree in trees.values())


def test_a_file_stands_for_features_only_as_a_whole(tmp_path: Path):
    np.save(tmp_path / "features.npy", np.arange(40.0).reshape(20, 2))
    whole = np.load(tmp_path / "features.npy", mmap_mode="r")
    changed = np.load(tmp_path / "features.npy", mmap_mode="c")
    assert file_of(whole) == str(tmp_path / "features.npy")
    for other in (whole[10:], whole[:, :1], whole[::-1], changed, whole.reshape(10, 4), np.array(whole)):
        assert file_of(other) is None


@pytest.mark.parametrize("told", [True, False], ids=["by inode", "by content"])
def test_another_file_under_the_path_does_not_stand_for_features(tmp_path: Path, monkeypatch, told: bool):
    if not told:
        monkeypatch.setattr(row_file, "_mapped_file", _not_told)
    path = tmp_path / "features.npy"
    np.save(path, np.arange(40.0).reshape(20, 2))
    mapped = np.load(path, mmap_mode="r")
    assert file_of(mapped) == str(path)
    path.unlink()
    assert file_of(mapped) is None
    np.save(path, np.arange(40.0)[::-1].reshape(20, 2))
    assert file_of(mapped) is None
    path.write_bytes(b"")
    assert file_of(mapped) is None


def _not_told(array: object) -> None:
    raise FileNotFoundError("/proc/self/maps")


def write_parquet(path: Path, features: np.ndarray, labels: np.ndarray, lists: bool, group: int) -> None:
    if lists:
        flat = pyarrow.array(features.ravel())
        table = {"x": pyarrow.FixedSizeListArray.from_arrays(flat, features.shape[1])}
    else:
        table = {f"x{number}": column for number, column in enumerate(features.T)}
    parquet.write_table(pyarrow.table({**table, "y": labels}), path, row_group_size=group)


@pytest.mark.parametrize("lists", [True, False])
def test_parquet_rows_are_the_array_they_were_written_from(tmp_path: Path, lists: bool):
    rng = np.random.default_rng(0)
    features, labels = rng.standard_normal((1000, 6)).astype(np.float32), rng.integers(0, 3, 1000)
    write_parquet(tmp_path / "rows.parquet", features, labels, lists, 64)
    streamed = fs.ParquetRows(tmp_path / "rows.parquet", "y", memory=4000)
    again = pickle.loads(pickle.dumps(streamed))
    chosen = rng.permutation(1000)[:300]
    for rows in (streamed, again):
        assert rows.shape == (1000, 6)
        assert rows.dtype == np.float32
        assert np.array_equal(rows.labels, labels)
        for asked in (slice(None), slice(60, 200), slice(5, 5), slice(0, 1000, 7), chosen, chosen > 100):
            expected = features[:300][asked] if np.asarray(asked).dtype == bool else features[asked]
            found = rows[asked] if np.asarray(asked).dtype != bool else rows[np.flatnonzero(asked)]
            assert np.array_equal(found, expected)
        assert sum(array.nbytes for array in rows._kept.values()) <= 4000
    with pytest.raises(DataError, match="row groups of"):
        fs.ParquetRows(tmp_path / "rows.parquet", "y", memory=100)
    with pytest.raises(DataError, match="no column 'z'"):
        fs.ParquetRows(tmp_path / "rows.parquet", "z")


@pytest.mark.parametrize("method", [fs.AFL(ridge=0.1), fs.DeepAFL(layers=2, width=12)], ids=lambda m: m.key)
def test_streamed_and_mapped_rows_give_the_bits_of_rows_in_memory(tmp_path: Path, method):
    rng = np.random.default_rng(0)
    features = rng.standard_normal((3000, 8)).astype(np.float32)
    labels, owners = np.argmax(features[:, :3], axis=1), np.sort(rng.integers(0, 5, 3000))
    write_parquet(tmp_path / "rows.parquet", features, labels, True, 500)
    np.save(tmp_path / "rows.npy", features)
    found = []
    sources = [features, fs.ParquetRows(tmp_path / "rows.parquet", "y", memory=40_000)]
    for source in [*sources, np.load(tmp_path / "rows.npy", mmap_mode="r")]:
        federation = fs.LocalFederation.from_arrays(source, labels, owners, memory_budget=1000)
        found.append(method.fit(federation).contents()[0])
    for other in found[1:]:
        assert all(np.array_equal(other[name], found[0][name]) for name in found[0])


def sources(folder: Path) -> tuple[dict[str, fs.RowFile | list[fs.RowFile]], np.ndarray, np.ndarray]:
    """Four clients in files of all kinds, one of them in two parts."""
    rng = np.random.default_rng(1)
    features = rng.standard_normal((400, 5)).astype(np.float32)
    labels = np.argmax(features[:, :3] + rng.standard_normal((400, 3)), axis=1)
    np.savez(folder / "a.npz", x=features[:100], y=labels[:100])
    np.save(folder / "b.npy", features[100:200])
    np.save(folder / "b-labels.npy", labels[100:200])
    write_parquet(folder / "c.parquet", features[200:], labels[200:], False, 50)
    files = {
        "a": fs.RowFile(str(folder / "a.npz")),
        "b": [
            fs.RowFile(str(folder / "b.npy"), labels=str(folder / "b-labels.npy"), stop=40),
            fs.RowFile(str(folder / "b.npy"), labels=str(folder / "b-labels.npy"), start=40),
        ],
        "c": fs.RowFile(str(folder / "c.parquet"), stop=120),
        "d": fs.RowFile(str(folder / "c.parquet"), start=120),
    }
    return files, features, labels


def test_a_worker_answers_for_files_and_asks_for_the_model_it_lacks(tmp_path: Path):
    files, features, labels = sources(tmp_path)
    one = {name: file for name, file in files.items() if isinstance(file, fs.RowFile)}
    worker = Worker(None, None, one, frozenset(), 1 << 20, None, "cpu")
    seen = worker.look(["a", "c", "d", "x"], "classification")
    assert [seen[name].rows for name in "acd"] == [100, 120, 80]
    assert seen["x"].startswith("KeyError")
    local = fs.LocalFederation.from_arrays(features, labels, np.zeros(400, dtype=int))
    run = fs.AFL(ridge=0.1).start(local.describe())
    request = run.request(("a", "c", "d"))
    bare = type(request)(request.kind, 0, 0, (), request.note, {}, request.position, request.digest)
    assert worker.answer(bare, [(0, [("a",)])], 1) == (Needs(0), [])
    report, ((_, _, term),) = worker.answer(request, [(0, [("a",)]), (1, [("c",), ("d",)])], 2)
    assert term.counts["rows"] == 300
    assert report.answered == ["a", "c", "d"]
    assert report.bytes_up == 3 * term.nbytes
    parts = [worker.answer(request, lanes, 2)[1] for lanes in ([(1, [("c",), ("d",)])], [(0, [("a",)])])]
    ((_, _, joined),) = worker.join(2, *parts)
    assert all(np.array_equal(joined.arrays[name], array) for name, array in term.arrays.items())


def replaced(path: Path, features: np.ndarray, labels: np.ndarray) -> None:
    """Another file under the path, of the same size and a later time."""
    before = path.stat()
    np.savez(path, x=features[::-1], y=labels) if path.suffix == ".npz" else np.save(path, features[::-1])
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))


@pytest.mark.parametrize("name", ["a.npz", "b.npy", "b-labels.npy"])
def test_a_worker_in_anothers_place_refuses_files_that_changed(tmp_path: Path, name: str):
    files, features, labels = sources(tmp_path)
    assert isinstance(files["b"], list)
    one = {"a": files["a"], "b": files["b"][1]}
    first, second, third = (Worker(None, None, one, frozenset(), 1 << 20, None, "cpu") for _ in range(3))
    stamps = {client: seen.stamps for client, seen in first.look(["a", "b"], "classification").items()}
    second.expect(stamps)
    assert second.look(["a", "b"], "classification")["a"].rows == 100
    third.expect(stamps)
    replaced(tmp_path / name, labels[100:200] if "labels" in name else features[:100], labels[:100])
    changed, kept = ("a", "b") if name == "a.npz" else ("b", "a")
    seen = third.look(["a", "b"], "classification")
    assert seen[kept].rows in (60, 100)
    assert seen[changed].startswith(f"DataError: {tmp_path / name} is no longer the file that was opened")
    # Rows in memory are as they were, mapped ones are not.
    again = first.look(["a", "b"], "classification")
    assert isinstance(again["a"], Seen)
    assert isinstance(again["b"], Seen) == (name == "a.npz")


def test_a_worker_refuses_a_mapped_file_that_changed(tmp_path: Path):
    features = np.random.default_rng(0).standard_normal((20, 2))
    np.save(tmp_path / "rows.npy", features)
    federation = fs.LocalFederation.from_arrays(
        np.load(tmp_path / "rows.npy", mmap_mode="r"), np.arange(20) % 2, np.arange(20) % 2
    )
    mark = FileStamp.of(tmp_path / "rows.npy")
    assert Worker(federation.partition, mark, {}, frozenset(), 1 << 20, None, "cpu").pid() == os.getpid()
    replaced(tmp_path / "rows.npy", features, features)
    worker = Worker(federation.partition, mark, {}, frozenset(), 1 << 20, None, "cpu")
    request = fs.AFL().start(federation.describe()).request(("client-0",))
    with pytest.raises(DataError, match=r"rows\.npy is no longer the file"):
        worker.answer(request, [(0, [("client-0",)])], 1)


class _Asked(Exception):
    """What a crew was asked for."""


def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Every crew that is asked for, none of which starts."""
    found: list[dict] = []

    def crew(rows, *given, **keywords):
        found.append({"rows": rows, **keywords})
        raise _Asked

    monkeypatch.setattr(ray_federation, "require_ray", lambda: None)
    monkeypatch.setattr(ray_federation, "Crew", crew)
    return found


def test_workers_compute_on_the_device_of_the_command_line_and_of_an_experiment(tmp_path: Path, monkeypatch):
    found = asked(monkeypatch)
    rng = np.random.default_rng(0)
    features, labels = rng.standard_normal((60, 4)), np.arange(60) % 3
    np.savez(tmp_path / "rows.npz", x=features, y=labels)
    line = ("train", tmp_path / "rows.npz", "--method", "afl", "--clients", 3, "--engine", "ray")
    # This machine needs no GPU: the workers say whether they have one.
    for device in ("torch:cpu", "cuda", "cuda:7", "auto"):
        fedsolve(*line, "--device", device)
        assert found.pop()["device"] == device
    refused(fedsolve(*line, "--device", "abacus"), 2, "device 'abacus'", "'torch:cpu', 'cuda', 'cuda:1'")
    rows = ExperimentRows(features[:40], labels[:40], features[40:], labels[40:], "key")
    method = '[[method]]\nmethod = "afl"\nparameters = {ridge = 1.0}\n'
    text = 'device = "cuda"\n' + opening("AFL", 0.1, 3, RANDOM, seeds=(0,), engine="ray") + method
    (cell,) = read_experiment(written(tmp_path, text)).cells()
    with pytest.raises(_Asked):
        train_cell(cell, rows)
    assert found.pop()["device"] == "cuda"
    local = fs.LocalFederation.from_arrays(features, labels, labels, device="torch:cpu")
    for keywords, device in (({}, "torch:cpu"), ({"device": "cuda"}, "cuda"), ({"device": None}, "cpu")):
        with pytest.raises(_Asked):
            fs.RayFederation.of(local, **keywords)
        assert found.pop()["device"] == device
    with pytest.raises(DataError, match="device must be a name; got 3"):
        fs.RayFederation.of(local, device=3)


def test_gpus_are_shared_so_that_all_workers_fit():
    assert gpu_share([(8, 2)], 1) == 1.0
    assert gpu_share([(8, 2)], 2) == 1.0
    assert gpu_share([(8, 2)], 3) == 0.5
    assert gpu_share([(8, 1)], 6) == 0.1666  # Ray rounds a sixth up, and six of them would not fit
    assert gpu_share([(1, 4), (8, 1)], 4) == 0.3333  # one CPU, one worker, whatever the GPUs
    assert gpu_share([(1, 1)], 4) == 0.25


def test_owners_may_be_names_in_ray_too(monkeypatch):
    found = asked(monkeypatch)
    features, labels = np.ones((4, 2)), np.array([0, 1, 0, 1])
    for owners in (["b", "a", "b", "c"], np.array([b"b", b"a", b"b", b"c"])):
        with pytest.raises(_Asked):
            fs.RayFederation.from_arrays(features, labels, owners)
        rows = found.pop()["rows"]
        assert tuple(rows.places) == ("a", "b", "c")
        assert rows.order.tolist() == [1, 0, 2, 3]


@pytest.mark.slow
def test_an_address_where_no_cluster_is_is_refused(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr(cluster, "_SECONDS", 1)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    for wrong in ("nonsense", "host:", "ray://host", "1.2.3.4:x", 3):
        with pytest.raises(DataError, match="address="):
            check_address(wrong, "address=")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        with pytest.raises(
            CohortError, match=f"'localhost:{port}' .RAY_ADDRESS.: .*refused.*ray start --head"
        ):
            check_address(f"localhost:{port}", "RAY_ADDRESS")
        silent.listen()
        for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
            with pytest.raises(CohortError, match="no Ray cluster answers"):
                check_address(address, "RAY_ADDRESS")
    for other in ("auto", "local", "anyscale://cluster"):
        check_address(other, "address=")
