"""The workers of a Ray cluster: started and asked. Ray replaces those that are lost, and asks them again."""

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
from fedsolve.data.parquet_rows import FileStamp
from fedsolve.errors import CohortError, DataError
from fedsolve.federation.cohort import CohortReport
from fedsolve.federation.members import PartitionedRows
from fedsolve.federation.messages import Chain, Needs, Request, Term
from fedsolve.threads import usable_cores

_START_SECONDS = 180
"""How long a worker may take to start; a cluster that has no room for it never starts it."""

_ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    # Clusters that others started hide the GPUs from workers that reserve none.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class WorkerLost(Exception):
    """A worker ended once more than it is replaced, or sums were lost with one."""


@dataclass(frozen=True)
class Errand:
    """Lanes that a worker is asked for, and what came of it.

    report: who answered, or that the worker is lost. sums: a reference to the nodes of the tree that it has.
    first: the model block from which on the request carries them; None: those that are new.
    """

    worker: int
    lanes: Sequence[Lane]
    first: int | None = None
    catch_up_bytes: int = 0
    report: CohortReport | WorkerLost | None = None
    sums: Any = None

    @property
    def names(self) -> list[str]:
        return [name for _, batches in self.lanes for names in batches for name in names]


class RayWorker:
    """A worker as an actor. It is made when it is first asked, by itself or by the one that replaces it."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._told: Mapping[str, tuple[Any, ...]] = {}

    def informed(
        self, stored: Sequence[Any], told: Mapping[str, tuple[Any, ...]], method: str, *words: Any
    ) -> Any:
        """What a method of the worker gives, after those that all workers are told.

        stored: a reference to what a worker is made of. told: arguments, by method.
        """
        if self._worker is None:
            import ray

            self._worker = Worker(*ray.get(stored[0]))
        if told != self._told:
            for name, values in told.items():
                getattr(self._worker, name)(*values)
            self._told = told
        return getattr(self._worker, method)(*words)


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
        self._told: dict[str, tuple[Any, ...]] = {}
        self._sent_told = ray.put(self._told)
        file = None if partition is None else file_of(partition.features)
        mapped = None if file is None else FileStamp.of(file)
        if partition is not None and mapped is not None:
            partition = replace(partition, features=np.empty((0, partition.features.shape[1])))
        given = partition, mapped, dict(files), further, memory // count, scratch, device
        self._stored = [ray.put(given)]
        self._actors = [self._make(machine) for machine in self.machines]
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

    def _make(self, machine: str | None) -> Any:
        options: dict[str, Any] = {
            "num_cpus": 1,
            "num_gpus": self._gpus,
            "max_restarts": self._restarts,
            "max_task_retries": self._restarts,
            "runtime_env": {"env_vars": _ENVIRONMENT},
        }
        if machine is not None:
            options["resources"] = {f"node:{machine}": 0.001}
        return self._ray.remote(RayWorker).options(**options).remote()

    def _ask(self, worker: int, method: str, *words: Any, parts: int = 1) -> Any:
        """A reference, or one for each part, to what this method of a worker gives."""
        ask = self._actors[worker].informed.options(num_returns=parts)
        return ask.remote(self._stored, self._sent_told, method, *words)

    def _wait_for_start(self) -> None:
        try:
            pids = [self._ask(worker, "pid") for worker in range(len(self))]
            self._ray.get(pids, timeout=_START_SECONDS)
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
        """Call this method of every worker, replaced or not, before it is asked for anything else."""
        self._told[method] = words
        self._sent_told = self._ray.put(self._told)

    def pids(self) -> list[int]:
        asked = [self._ask(worker, "pid") for worker in range(len(self._actors))]
        return [pid for pid in map(self._taken, asked) if not isinstance(pid, WorkerLost)]

    def look(self, names: Mapping[int, Sequence[str]], task: str) -> dict[str, Seen | str]:
        """What the clients' rows are, as the workers that have them see it, or why that is not known."""
        asked = {worker: self._ask(worker, "look", own, task) for worker, own in names.items()}
        seen: dict[str, Seen | str] = {}
        for worker, reference in asked.items():
            found = self._taken(reference)
            lost = isinstance(found, WorkerLost)
            seen |= dict.fromkeys(names[worker], f"WorkerLost: {found}") if lost else found
        return seen

    def _taken(self, reference: Any) -> Any:
        """What a worker gives; `WorkerLost` after too many losses."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as problem:
            raise CohortError(f"a worker failed: {_cause(problem)}") from problem
        except self._ray.exceptions.RayError as problem:
            often = "once" if self._restarts == 0 else f"{self._restarts + 1} times"
            return WorkerLost(
                f"its worker was lost {often} ({_cause(problem)}). Find the cause, such as too little "
                "memory, and resume"
            )

    def exchange(
        self, request: Request, chain: Chain, work: Mapping[int, Sequence[Sequence[Lane]]], places: int
    ) -> Iterator[Errand]:
        """Ask for lanes, by worker and packet, and give what comes of each packet as it is done."""
        sent: dict[int | None, Any] = {None: self._ray.put(request)}
        asked: dict[Any, Errand] = {}

        def ask(errand: Errand) -> None:
            words = sent[errand.first], errand.lanes, places
            report, sums = self._ask(errand.worker, "answer", *words, parts=2)
            asked[report] = replace(errand, sums=sums)

        for worker, packets in work.items():
            for lanes in packets:
                ask(Errand(worker, lanes))
        while asked:
            (reference,), _ = self._ray.wait(list(asked), num_returns=1)
            errand = asked.pop(reference)
            report: CohortReport | Needs | WorkerLost = self._taken(reference)
            if isinstance(report, Needs):
                if errand.first is not None and errand.first <= report.have:
                    raise CohortError(
                        f"a worker still lacks model blocks from {report.have} on after being sent them."
                    )
                longer = request.starting_at(report.have, chain)
                if report.have not in sent:
                    sent[report.have] = self._ray.put(longer)
                catch_up = errand.catch_up_bytes + len(errand.names) * longer.nbytes
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
            return worker, [self._ask(worker, "join", places, *parts)]

        sums = [meet(worker, parts) if len(parts) > 1 else (worker, parts) for worker, parts in sums]
        while len(sums) > 1:
            pairs = [sums[first : first + 2] for first in range(0, len(sums), 2)]
            sums = [meet(pair[0][0], pair[0][1] + pair[1][1]) if len(pair) > 1 else pair[0] for pair in pairs]
        nodes = self._taken(sums[0][1][0]) if sums else []
        if isinstance(nodes, WorkerLost):
            raise nodes
        tree = SumTree(places)
        for node in [*nodes, *others]:
            tree.add(*node)
        ((_, _, term),) = tree.nodes()
        return term

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
