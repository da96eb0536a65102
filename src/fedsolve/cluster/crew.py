"""The workers of a Ray cluster: started, asked, and replaced when they are lost."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedsolve.cluster import check_address, unreachable
from fedsolve.cluster.lanes import Lane, Node, SumTree
from fedsolve.cluster.row_file import RowFile, file_of
from fedsolve.cluster.worker import Seen, Worker
from fedsolve.errors import CohortError, DataError
from fedsolve.federation.cohort import CohortReport
from fedsolve.federation.members import PartitionedRows
from fedsolve.federation.messages import Chain, Needs, Request, Term
from fedsolve.tables.fingerprints import FileStamp
from fedsolve.threads import usable_cores

_START_SECONDS = 180
"""How long a worker may take to start; a cluster that has no room for it never starts it."""

_ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    # Clusters that others started hide the GPUs from workers that reserve none.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class WorkerLost(Exception):
    """A worker ended, and no other took its place."""


@dataclass(frozen=True)
class Errand:
    """Lanes that a worker is asked for, and what came of it.

    report: who answered, or that the worker is lost. sums: a reference to the nodes of the tree that it has.
    first: the model block from which on the request carries them; None: those that are new.
    """

    worker: int
    generation: int
    lanes: Sequence[Lane]
    first: int | None = None
    catch_up_bytes: int = 0
    again: int = 0
    report: CohortReport | WorkerLost | None = None
    sums: Any = None

    @property
    def names(self) -> list[str]:
        return [name for _, batches in self.lanes for names in batches for name in names]


class Crew:
    """Actors that answer for clients, one BLAS thread each.

    partition, files: what they may be asked about; common arrays go into Ray's store once, files go nowhere.
    further: files that are a further part of a client.
    """

    def __init__(
        self,
        partition: PartitionedRows | None,
        files: Mapping[str, RowFile],
        further: frozenset[str],
        memory: int,
        scratch: str | None,
        *,
        workers: int | None,
        most: int,
        address: str | None,
        gpus: float | None,
        device: str,
        restarts: int,
    ) -> None:
        import ray

        self._ray = ray
        machines = [file.machine for file in files.values()]
        bound = sorted({machine for machine in machines if machine is not None})
        self._started = self._connect(address, workers)
        free = int(ray.cluster_resources().get("CPU", 1))
        having = self._with_gpus(device, bound) if gpus is None else []
        if having:
            free = sum(map(min, having))
        count = max(1, min(workers or free, most), len(bound))
        # Where every client is bound to a machine, all workers are, in turn.
        others = [None] * count if None in machines or not bound else bound * count
        self.machines: list[str | None] = [*bound, *others][:count]
        self._gpus = gpu_share(having, count) if having else gpus or 0.0
        self._restarts = restarts
        self._lost = [0] * count
        self._generations = [0] * count
        self._given_up: dict[int, WorkerLost] = {}
        self._told: dict[str, tuple[Any, ...]] = {}
        file = None if partition is None else file_of(partition.features)
        mapped = None if file is None else FileStamp.of(file)
        if partition is not None and mapped is not None:
            partition = replace(partition, features=np.empty((0, partition.features.shape[1])))
        stored = ray.put(partition), mapped, ray.put(dict(files))
        self._given = [*stored, further, memory // count, scratch, device]
        self._actors = [self._make(worker) for worker in range(count)]
        self._wait_for_start()

    def __len__(self) -> int:
        return len(self.machines)

    def _connect(self, address: str | None, workers: int | None) -> bool:
        """Connect to a cluster, or start one on this machine; whether this process has to end it."""
        if self._ray.is_initialized():
            return False
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        given = "address=" if address else "RAY_ADDRESS"
        address = address or os.environ.get("RAY_ADDRESS")
        if address:
            check_address(address, given)
            try:
                self._ray.init(address=address, **quiet)
            except Exception as problem:
                raise unreachable(address, given, problem) from problem
            return True
        # On the loopback alone: nobody else should find it.
        self._ray.init(
            address="local",
            num_cpus=max(workers or 0, usable_cores()),
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            **quiet,
        )
        return True

    def _with_gpus(self, device: str, bound: Sequence[str]) -> list[tuple[int, int]]:
        """CPUs and GPUs of the machines whose GPUs workers should reserve; none for other devices."""
        if device not in ("cuda", "cuda:0", "auto"):
            return []  # a number counts a machine's GPUs, and who reserves one sees no other
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        having = [node for node in nodes if node.get("GPU")]
        if device == "auto" and not all(any(f"node:{name}" in node for node in having) for name in bound):
            return []
        return [(int(node.get("CPU", 0)), int(node["GPU"])) for node in having]

    def _make(self, worker: int) -> Any:
        machine = self.machines[worker]
        options: dict[str, Any] = {
            "num_cpus": 1,
            "num_gpus": self._gpus,
            "max_restarts": 0,
            "runtime_env": {"env_vars": _ENVIRONMENT},
        }
        if machine is not None:
            options["resources"] = {f"node:{machine}": 0.001}
        actor = self._ray.remote(Worker).options(**options).remote(*self._given)
        for method, words in self._told.items():
            getattr(actor, method).remote(*words)
        return actor

    def _wait_for_start(self) -> None:
        try:
            self._ray.get([actor.pid.remote() for actor in self._actors], timeout=_START_SECONDS)
        except self._ray.exceptions.GetTimeoutError as problem:
            has = {name: value for name, value in self._ray.cluster_resources().items() if ":" not in name}
            self.close()
            raise CohortError(
                f"{len(self)} workers did not start within {_START_SECONDS} s: each needs a CPU"
                f"{f' and {self._gpus:g} GPU' if self._gpus else ''}, the cluster has {has}. "
                "Ask for fewer (workers=), or name machines that are there."
            ) from problem
        except self._ray.exceptions.RayError as problem:
            self.close()
            raise DataError(f"the workers cannot start: {_cause(problem)}") from problem

    def tell(self, method: str, *words: Any) -> None:
        """Call this method of every worker, and of those that replace a lost one later."""
        self._told[method] = words
        for actor in self._actors:
            getattr(actor, method).remote(*words)

    def pids(self) -> list[int]:
        found = self._each("pid", dict.fromkeys(range(len(self._actors)), ()))
        return [pid for pid in found.values() if not isinstance(pid, WorkerLost)]

    def look(self, names: Mapping[int, Sequence[str]], task: str) -> dict[str, Seen | str]:
        """What the clients' rows are, as the workers that have them see it, or why that is not known."""
        found = self._each("look", {worker: (own, task) for worker, own in names.items()})
        seen: dict[str, Seen | str] = {}
        for worker, own in found.items():
            lost = isinstance(own, WorkerLost)
            seen |= dict.fromkeys(names[worker], f"WorkerLost: {own}") if lost else own
        return seen

    def _each(self, method: str, words: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """What this method of workers, or their replacements, gives; `WorkerLost` after too many losses."""

        def ask(worker: int) -> tuple[int, Any]:
            reference = getattr(self._actors[worker], method).remote(*words[worker])
            return self._generations[worker], reference

        found: dict[int, Any] = {}
        asked = {worker: ask(worker) for worker in words}
        while asked:
            worker, given = next(iter(asked.items()))
            found[worker] = self._taken(worker, *given)
            if found[worker] is None:
                asked[worker] = ask(worker)
            else:
                del asked[worker]
        return found

    def _taken(self, worker: int, generation: int, reference: Any) -> Any:
        """What a worker gives; None where it was lost and replaced, `WorkerLost` after too many losses."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as problem:
            raise CohortError(f"a worker failed: {_cause(problem)}") from problem
        except self._ray.exceptions.RayError as problem:
            try:
                return self._replace(worker, generation, problem)
            except WorkerLost as lost:
                return lost

    def exchange(
        self, request: Request, chain: Chain, work: Mapping[int, Sequence[Sequence[Lane]]], places: int
    ) -> Iterator[Errand]:
        """Ask for lanes, by worker and packet, and give what comes of each packet as it is done."""
        sent: dict[int | None, Any] = {None: self._ray.put(request)}
        asked: dict[Any, Errand] = {}

        def ask(errand: Errand) -> None:
            if errand.first not in sent:
                assert errand.first is not None
                sent[errand.first] = self._ray.put(request.starting_at(errand.first, chain))
            answer = self._actors[errand.worker].answer.options(num_returns=2)
            report, sums = answer.remote(sent[errand.first], errand.lanes, places)
            asked[report] = replace(errand, sums=sums)

        for worker, packets in work.items():
            for lanes in packets:
                ask(Errand(worker, self._generations[worker], lanes))
        while asked:
            (reference,), _ = self._ray.wait(list(asked), num_returns=1)
            errand = asked.pop(reference)
            report: CohortReport | Needs | WorkerLost | None
            report = self._taken(errand.worker, errand.generation, reference)
            if report is None:
                ask(replace(errand, generation=self._generations[errand.worker], again=errand.again + 1))
            elif isinstance(report, WorkerLost):
                yield replace(errand, report=report, sums=None)
            elif isinstance(report, Needs):
                if errand.first is not None and errand.first <= report.have:
                    raise CohortError(
                        f"a worker still lacks model blocks from {report.have} on after being sent them."
                    )
                more = len(errand.names) * request.starting_at(report.have, chain).nbytes
                catch_up = errand.catch_up_bytes + more
                ask(replace(errand, catch_up_bytes=catch_up, first=report.have))
            else:
                yield replace(errand, report=report)

    def joined(self, errands: Sequence[Errand], places: int, others: list[Node]) -> Term:
        """The sum of all lanes; others: nodes of the tree that no worker has.

        Workers pass their sums on to a neighbour, pair by pair, so that a single one comes here.

        Raises `WorkerLost` where sums were lost with a worker: the lanes must be asked for again.
        """
        found: dict[int, list[Any]] = {}
        for errand in sorted(errands, key=lambda errand: errand.lanes[0][0]):
            found.setdefault(errand.worker, []).append(errand.sums)
        sums = list(found.items())

        def meet(worker: int, parts: list[Any]) -> tuple[int, list[Any]]:
            return worker, [self._actors[worker].join.remote(places, *parts)]

        try:
            sums = [meet(worker, parts) if len(parts) > 1 else (worker, parts) for worker, parts in sums]
            while len(sums) > 1:
                pairs = [sums[first : first + 2] for first in range(0, len(sums), 2)]
                sums = [
                    meet(pair[0][0], pair[0][1] + pair[1][1]) if len(pair) > 1 else pair[0] for pair in pairs
                ]
            nodes = self._ray.get(sums[0][1][0]) if sums else []
        except self._ray.exceptions.RayTaskError as problem:
            raise CohortError(f"a worker failed: {_cause(problem)}") from problem
        except self._ray.exceptions.RayError as problem:
            raise WorkerLost(_cause(problem)) from problem
        tree = SumTree(places)
        for node in [*nodes, *others]:
            tree.add(*node)
        ((_, _, term),) = tree.nodes()
        return term

    def _replace(self, worker: int, generation: int, problem: Exception) -> None:
        """Replace a lost worker, unless it was lost too often."""
        if worker in self._given_up:
            raise self._given_up[worker]  # what else it was asked for is no further loss
        if generation != self._generations[worker]:
            return  # this was the loss of one that has been replaced already
        self._lost[worker] += 1
        if self._lost[worker] > self._restarts:
            often = "once" if self._lost[worker] == 1 else f"{self._lost[worker]} times"
            self._given_up[worker] = WorkerLost(
                f"its worker was lost {often} ({_cause(problem)}). Find the cause, such as too little "
                "memory, and resume"
            )
            raise self._given_up[worker]
        self._ray.kill(self._actors[worker])
        self._actors[worker] = self._make(worker)
        self._generations[worker] += 1

    def close(self) -> None:
        if not self._ray.is_initialized():
            return
        for actor in getattr(self, "_actors", ()):
            self._ray.kill(actor)
        self._actors = []
        if self._started:
            self._ray.shutdown()


def gpu_share(machines: Sequence[tuple[int, int]], workers: int) -> float:
    """The part of a GPU that each worker can have, rounded down to Ray's four digits so that all parts fit.

    machines: CPUs, of which each worker needs one, and GPUs of each.
    """
    for each in range(1, workers + 1):
        if sum(min(cpus, gpus * each) for cpus, gpus in machines) >= workers:
            break
    return int(10_000 / each) / 10_000


def _cause(problem: Exception) -> str:
    """The last line of an error that came from another process."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return lines[-1] if lines else type(problem).__name__
