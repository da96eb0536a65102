"""Resume: a run killed at any moment and continued gives the bytes of an uninterrupted one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import fedsolve as fs
from fedsolve import container
from fedsolve.federation.engine import Federation
from fedsolve.federation.method import Method, Record

X = np.random.default_rng(0).standard_normal((400, 10))
Y = np.argmax(X[:, :4] + 0.3 * X[:, 4:8] ** 2, axis=1)


def federation(clients: int = 6) -> fs.LocalFederation:
    return fs.LocalFederation.from_arrays(X, Y, fs.partition.dirichlet(Y, clients, 0.1), clients=clients)


class Stop(Exception):
    pass


def stop_after(count: int) -> Any:
    def progress(record: Record, expected: int) -> None:
        if record.exchange + 1 == count:
            raise Stop

    return progress


def settings() -> list[Any]:
    base = {"layers": 4, "width": 24}
    return [
        *(fs.DeepAFL(**base, exchange=plan) for plan in ("textbook", "lean", "single")),
        fs.DeepAFL(**base, participation=0.5),
        fs.DeepAFL(**base, participation=0.5, consistent=False, exchange="single"),
        fs.DeepAFL(**base, scale="standard", intercept=True, track="accuracy"),
        fs.DeepAFL(**base, precision="float32"),
        fs.AFL(ridge=0.5, scale="standard"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("method", settings(), ids=lambda m: f"{m.key}-{getattr(m, 'exchange', '')}")
def test_resume_after_every_exchange(tmp_path: Path, method: Method[Any]) -> None:
    whole = method.fit(federation())
    whole.save(tmp_path / "whole")
    for count in range(1, len(whole.history)):
        checkpoint = tmp_path / f"checkpoint-{count}"
        with pytest.raises(Stop):
            method.fit(federation(), checkpoint=checkpoint, follow=stop_after(count))
        resumed = method.fit(federation(), checkpoint=checkpoint, resume=True)
        resumed.save(tmp_path / "resumed")
        assert (tmp_path / "resumed").read_bytes() == (tmp_path / "whole").read_bytes()
        assert [r.exchange for r in resumed.history] == [r.exchange for r in whole.history]
        for mine, theirs in zip(resumed.history, whole.history, strict=True):
            assert (mine.bytes_up, mine.bytes_down, mine.risk, mine.cohort, mine.solved) == (
                theirs.bytes_up,
                theirs.bytes_down,
                theirs.risk,
                theirs.cohort,
                theirs.solved,
            )


def test_resume_of_a_finished_run_asks_nothing(tmp_path: Path) -> None:
    method = fs.DeepAFL(layers=2, width=16)
    first = method.fit(federation(), checkpoint=tmp_path / "c")
    again = method.fit(federation(), checkpoint=tmp_path / "c", resume=True, follow=stop_after(1))
    np.testing.assert_array_equal(first.classifiers[-1], again.classifiers[-1])


def test_resume_without_a_file_starts_afresh(tmp_path: Path) -> None:
    model = fs.DeepAFL(layers=1, width=16).fit(federation(), checkpoint=tmp_path / "new", resume=True)
    assert len(model.history) == 3


def test_an_existing_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    method = fs.DeepAFL(layers=1, width=16)
    method.fit(federation(), checkpoint=tmp_path / "c")
    before = (tmp_path / "c").read_bytes()
    with pytest.raises(fs.ModelFileError, match=r"exists\. Pass resume=True"):
        method.fit(federation(), checkpoint=tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == before


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    fs.DeepAFL(layers=1, width=16).fit(federation(), checkpoint=tmp_path / "c")
    for other in (fs.DeepAFL(layers=1, width=17), fs.DeepAFL(layers=1, width=16, seed=1), fs.AFL(ridge=1.0)):
        with pytest.raises(fs.ModelFileError, match="other parameters"):
            other.fit(federation(), checkpoint=tmp_path / "c", resume=True)


def test_a_truncated_checkpoint_is_refused(tmp_path: Path) -> None:
    fs.DeepAFL(layers=1, width=16).fit(federation(), checkpoint=tmp_path / "c")
    data = (tmp_path / "c").read_bytes()
    (tmp_path / "c").write_bytes(data[:-100])
    with pytest.raises(fs.ModelFileError, match="damaged, truncated"):
        fs.DeepAFL(layers=1, width=16).fit(federation(), checkpoint=tmp_path / "c", resume=True)


def test_a_model_is_not_a_checkpoint(tmp_path: Path) -> None:
    method = fs.DeepAFL(layers=1, width=16)
    method.fit(federation()).save(tmp_path / "m")
    with pytest.raises(fs.ModelFileError, match="not a checkpoint"):
        method.fit(federation(), checkpoint=tmp_path / "m", resume=True)


def test_resume_needs_a_path() -> None:
    with pytest.raises(fs.DataError, match="checkpoint path"):
        fs.DeepAFL(layers=1, width=16).fit(federation(), resume=True)


def test_a_failed_exchange_leaves_the_checkpoint_usable(tmp_path: Path) -> None:
    method = fs.DeepAFL(layers=3, width=16)
    silos = federation()
    victim = silos.participants[2]
    original = victim.answer

    def fail_once(request: Any, workspace: Any = None) -> Any:
        if request.exchange == 4:
            raise OSError("disk gone")
        return original(request, workspace)

    victim.answer = fail_once  # type: ignore[method-assign]
    with pytest.raises(fs.CohortError, match=f"'{victim.name}' failed in exchange 4"):
        method.fit(silos, checkpoint=tmp_path / "c")
    resumed = method.fit(federation(), checkpoint=tmp_path / "c", resume=True)
    whole = method.fit(federation())
    np.testing.assert_array_equal(resumed.classifiers[-1], whole.classifiers[-1])


TRAIN = """
import sys
import numpy as np
import fedsolve as fs
from fedsolve import container
from sklearn.datasets import load_digits
X, y = load_digits(return_X_y=True)
owners = fs.partition.dirichlet(y, 20, 0.1, seed=3)
federation = fs.LocalFederation.from_arrays(X / 16, y, owners, clients=20)
checkpoint = sys.argv[2] if len(sys.argv) > 2 else None
model = fs.DeepAFL(layers=30, width=128).fit(federation, checkpoint, resume=checkpoint is not None)
model.save(sys.argv[1])
"""


def start(*arguments: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", TRAIN, *map(str, arguments)])


@pytest.mark.slow
def test_kill_minus_nine_in_a_thirty_layer_run(tmp_path: Path) -> None:
    """SIGKILL as soon as a few more exchanges have been stored, three times over, then finish."""
    assert start(tmp_path / "whole").wait(300) == 0
    checkpoint = tmp_path / "checkpoint"
    kills = 0
    seen = 0
    while kills < 3:
        process = start(tmp_path / "resumed", checkpoint)
        target, replaced = seen + 5, seen
        last = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        while process.poll() is None and replaced < target:
            now = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
            if now != last:
                last, replaced = now, replaced + 1
            time.sleep(0.0005)
        assert process.poll() is None, "the run ended before it could be killed"
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        seen, kills = replaced, kills + 1
        assert not (tmp_path / "resumed").exists()
    assert start(tmp_path / "resumed", checkpoint).wait(300) == 0
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "whole").read_bytes()


class Elsewhere(Federation):
    """An engine that does not know whose rows are which, as one over a network."""

    prefers: Literal["bytes", "exchanges"] = "bytes"

    def __init__(self, federation: fs.LocalFederation) -> None:
        self._within = federation

    @property
    def clients(self) -> tuple[str, ...]:
        return self._within.clients

    def describe(self) -> Any:
        return self._within.describe()

    def exchange(self, request: Any, chain: Any) -> Any:
        return self._within.exchange(request, chain)


@pytest.mark.parametrize("exchange", ["lean", "single"])
def test_resume_on_other_rows_asks_for_the_sums_again(tmp_path: Path, exchange: str) -> None:
    """The old (G, H) do not describe rows that were not there; each exchange is exact for its own.

    Over a network, where rows may change between exchanges; in one process they are refused.
    """
    method = fs.DeepAFL(layers=3, width=16, exchange=exchange)
    with pytest.raises(Stop):
        method.fit(Elsewhere(federation()), checkpoint=tmp_path / "c", follow=stop_after(2))
    owners = fs.partition.dirichlet(Y, 6, 0.1)
    fewer = fs.LocalFederation.from_arrays(X[:200], Y[:200], owners[:200], clients=6, classes=[0, 1, 2, 3])
    model = method.fit(Elsewhere(fewer), checkpoint=tmp_path / "c", resume=True)
    kinds = [record.kind for record in model.history[2:]]
    assert any("classifier" in kind for kind in kinds)
    assert len(model.history) > method.start(fewer.describe()).exchanges


# -- other clients and other rows ------------------------------------------------------------------

SMALL = fs.DeepAFL(layers=2, width=16)
OWNERS = fs.partition.dirichlet(Y, 6, 0.1)


def dealt(x: Any = X, y: Any = Y, owners: Any = OWNERS, **more: Any) -> fs.LocalFederation:
    return fs.LocalFederation.from_arrays(x, y, owners, classes=[0, 1, 2, 3], **more)


def changed(array: Any, place: int, value: Any) -> Any:
    other = array.copy()
    other[place] = value
    return other


def of_first_client(end: int) -> int:
    return int(np.flatnonzero(OWNERS == 0)[end])


def own_rows() -> list[fs.Participant]:
    return [fs.Participant(f"site-{k}", fs.ClientData(X[k::4], Y[k::4])) for k in range(4)]


def gathered(participants: list[fs.Participant]) -> fs.LocalFederation:
    return fs.LocalFederation(participants, classes=[0, 1, 2, 3])


OTHERS = {
    "more clients": (lambda: dealt(clients=7), r"other clients: it knows 6 \('client-0'.*here are 7"),
    "other names": (
        lambda: dealt(owners=np.array([f"site-{owner}" for owner in OWNERS])),
        r"other clients: it knows 6 .*here are 6 \('site-0'",
    ),
    "another partition": (
        lambda: dealt(owners=fs.partition.iid(Y, 6)),
        r"other rows of 'client-0' \(.* rows, now .*\), and of \d more",
    ),
    "another label": (
        lambda: dealt(y=changed(Y, of_first_client(1), (Y[of_first_client(1)] + 1) % 4)),
        r"other rows of 'client-0' \(\d+ rows as now, but not these\)\.",
    ),
    "another first row": (lambda: dealt(changed(X, of_first_client(0), 0.5)), r"of 'client-0' [^,]*, but"),
    "another last row": (lambda: dealt(changed(X, of_first_client(-1), 0.5)), r"of 'client-0' [^,]*, but"),
    "weights": (lambda: dealt(sample_weight=np.linspace(0.1, 1, len(Y))), r"other rows of 'client-0'"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    "around", [fs.Recipe, lambda m: fs.Recipe(m, calibrate=True)], ids=["plain", "calibrated"]
)
def test_other_clients_and_other_rows_are_refused(tmp_path: Path, name: str, around: Any) -> None:
    made, message = OTHERS[name]
    method = around(SMALL)
    with pytest.raises(Stop):
        method.fit(dealt(), checkpoint=tmp_path / "c", follow=stop_after(2))
    before = (tmp_path / "c").read_bytes()
    with pytest.raises(fs.ModelFileError, match=message):
        method.fit(made(), checkpoint=tmp_path / "c", resume=True)
    assert (tmp_path / "c").read_bytes() == before
    method.fit(dealt(X.astype(np.float64), Y.astype(np.int32)), checkpoint=tmp_path / "c", resume=True)


@pytest.mark.parametrize("method", [fs.APFL(layers=2, width=16), fs.Recipe(SMALL, class_weight="balanced")])
def test_methods_around_others_know_whose_rows_they_have(tmp_path: Path, method: Method[Any]) -> None:
    method.fit(dealt(), checkpoint=tmp_path / "c")
    method.fit(dealt(), checkpoint=tmp_path / "c", resume=True)
    with pytest.raises(fs.ModelFileError, match="other rows of 'client-0'"):
        method.fit(dealt(owners=fs.partition.iid(Y, 6)), checkpoint=tmp_path / "c", resume=True)


def test_labels_of_text_are_looked_at(tmp_path: Path) -> None:
    texts = np.array(["no", "yes", "perhaps", "never"])[Y]
    federations = [fs.LocalFederation.from_arrays(X, y, OWNERS) for y in (texts, texts[::-1], texts)]
    SMALL.fit(federations[0], checkpoint=tmp_path / "c")
    with pytest.raises(fs.ModelFileError, match="other rows of"):
        SMALL.fit(federations[1], checkpoint=tmp_path / "c", resume=True)
    SMALL.fit(federations[2], checkpoint=tmp_path / "c", resume=True)


def test_participants_may_join_and_leave_with_the_rows_they_had(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        SMALL.fit(gathered(own_rows()[:3]), checkpoint=tmp_path / "c", follow=stop_after(1))
    with pytest.raises(Stop):
        SMALL.fit(gathered(own_rows()), checkpoint=tmp_path / "c", resume=True, follow=stop_after(2))
    federation = gathered(own_rows())
    federation.remove("site-1")
    with pytest.raises(Stop):
        SMALL.fit(federation, checkpoint=tmp_path / "c", resume=True, follow=stop_after(3))
    other = own_rows()
    other[2] = fs.Participant("site-2", fs.ClientData(X[3::4], Y[3::4]))
    with pytest.raises(fs.ModelFileError, match=r"other rows of 'site-2' \(100 rows as now"):
        SMALL.fit(gathered(other), checkpoint=tmp_path / "c", resume=True)
    with pytest.raises(fs.ModelFileError, match=r"other clients: it knows 3"):
        SMALL.fit(gathered(own_rows()[1:2]), checkpoint=tmp_path / "c", resume=True)
    assert SMALL.fit(gathered(own_rows()), checkpoint=tmp_path / "c", resume=True).layers == 2


def test_who_joined_in_a_run_belongs_to_its_checkpoint(tmp_path: Path) -> None:
    late = fs.Participant("late", fs.ClientData(X[:40], Y[:40]))
    federation = dealt()

    def joins(record: Record, expected: int) -> None:
        if record.exchange == 0:
            federation.add(late)
        stop_after(3)(record, expected)

    with pytest.raises(Stop):
        SMALL.fit(federation, checkpoint=tmp_path / "c", follow=joins)
    with pytest.raises(fs.ModelFileError, match="it knows 7 "):
        SMALL.fit(dealt(), checkpoint=tmp_path / "c", resume=True)
    again = dealt()
    again.add(late)
    SMALL.fit(again, checkpoint=tmp_path / "c", resume=True)


def test_dealt_and_own_arrays_are_known_as_the_same_rows() -> None:
    federation = dealt()
    known = federation.holdings()
    assert known.dealt
    apart = gathered([fs.Participant(p.name, p.data) for p in federation.participants])
    copies = gathered(
        [fs.Participant(f"client-{k}", fs.ClientData(X[k == OWNERS], Y[k == OWNERS])) for k in range(6)]
    )
    assert known.clients == federation.holdings().clients == apart.holdings().clients
    assert known.clients == copies.holdings().clients
    assert not apart.holdings().dealt


def test_rows_of_parquet_are_hardly_read_for_it(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {f"x{k}": X[:, k] for k in range(X.shape[1])} | {"y": Y}
    parquet.write_table(arrow.table(columns), tmp_path / "rows.parquet", row_group_size=50)
    rows = fs.ParquetRows(tmp_path / "rows.parquet", "y")
    federation = dealt(rows, rows.labels)
    rows._kept.clear()  # checking them read all
    assert federation.holdings().clients.keys() == dealt().holdings().clients.keys()
    assert list(rows._kept) == [0]
    parquet.write_table(arrow.table(columns | {"x0": X[:, 0] + 1}), tmp_path / "other.parquet")
    other = fs.ParquetRows(tmp_path / "other.parquet", "y")
    with pytest.raises(fs.ModelFileError, match=r"other rows of 'client-0' .*of 5 more"):
        dealt(other, other.labels).holdings().check(federation.holdings().note(), "c")


def test_files_honour_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        fs.DeepAFL(layers=1, width=16).fit(federation(), checkpoint=tmp_path / "c").save(tmp_path / "m")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("c", "m")] == [0o600, 0o600]


def test_a_checkpoint_without_a_field_is_refused(tmp_path: Path) -> None:
    method = fs.DeepAFL(layers=1, width=16)
    method.fit(federation(), checkpoint=tmp_path / "c")
    arrays, note = container.from_bytes((tmp_path / "c").read_bytes(), what="", error=fs.ModelFileError)
    del note["history"]
    (tmp_path / "c").write_bytes(container.to_bytes(arrays, note))
    with pytest.raises(fs.ModelFileError, match=r"damaged.*history"):
        method.fit(federation(), checkpoint=tmp_path / "c", resume=True)
