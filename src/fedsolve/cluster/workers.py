"""The workers of a Ray cluster: started, asked, and replaced when they are lost."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedsolve.cluster.addresses import check_address, unreachable
from fedsolve.cluster.placing import Seated, file_of
from fedsolve.cluster.row_file import RowFile
from fedsolve.cluster.shard import Packet, Shard
from fedsolve.data.file_mark import FileMark
from fedsolve.errors import CohortError, DataError
from fedsolve.federation.members import Deal
from fedsolve.federation.messages import Chain, Needs, Request
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
class Delivery:
    """What came of a packet: its sums, or that its worker is lost; bytes sent besides; how often it was."""

    result: Packet | WorkerLost
    leaves: Sequence[Seated]
    catch_up_bytes: int
    again: int

    @property
    def names(self) -> list[str]:
        return [name for _, names in self.leaves for name in names]


@dataclass(frozen=True)
class _Errand:
    worker: int
    generation: int
    leaves: Sequence[Seated]
    catch_up: int = 0
    again: int = 0
    first: int | None = None


class Crew:
    """Actors that answer for clients, one BLAS thread each.

    deal, files: what they may be asked about; common arrays go into Ray's store once, files go nowhere.
    """

    def __init__(
        self,
        deal: Deal | None,
        files: Mapping[str, RowFile],
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
        bound = sorted({file.machine for file in files.values() if file.machine is not None})
        self._started = self._connect(address, workers)
        free = int(ray.cluster_resources().get("CPU", 1))
        having = self._with_gpus(device, bound) if gpus is None else []
        if having:
            free = sum(map(min, having))
        count = max(1, min(workers or free, most), len(bound))
        self.machines: list[str | None] = [*bound, *[None] * (count - len(bound))]
        self._gpus = gpu_share(having, count) if having else gpus or 0.0
        self._restarts = restarts
        self._lost = [0] * count
        self._generations = [0] * count
        self._given_up: dict[int, WorkerLost] = {}
        self._told: dict[str, tuple[Any, ...]] = {}
        file = None if deal is None else file_of(deal.features)
        mapped = None if file is None else FileMark.of(file)
        if deal is not None and mapped is not None:
            deal = replace(deal, features=np.empty((0, deal.features.shape[1])))
        self._given = [ray.put(deal), mapped, ray.put(dict(files)), memory // count, scratch, device]
        self._actors = [self._make(worker) for worker in range(count)]
        self._wait_for_start()

    def __len__(self) -> int:
        return len(self.machines)

    def _connect(self, address: str | None, workers: int | None) -> bool:
        """Whether a cluster was started here."""
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
        """CPUs and GPUs of the machines whose GPUs workers on this device should reserve; none for others."""
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
        actor = self._ray.remote(Shard).options(**options).remote(*self._given)
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
        """Tell every worker something, also those that take a lost one's place."""
        self._told[method] = words
        for actor in self._actors:
            getattr(actor, method).remote(*words)

    def pids(self) -> list[int]:
        """The processes of the workers; those that were lost too often have none."""
        found = self._each("pid", dict.fromkeys(range(len(self._actors)), ()))
        return [pid for pid in found.values() if not isinstance(pid, WorkerLost)]

    def look(self, leaves: Mapping[int, Sequence[Seated]], task: str) -> list[dict[str, Any]]:
        """What the clients' rows are, as the workers that have them see it."""
        asked = {worker: [name for _, names in own for name in names] for worker, own in leaves.items()}
        found = self._each("look", {worker: (names, task) for worker, names in asked.items()})
        return [
            dict.fromkeys(asked[worker], ("WorkerLost", str(seen))) if isinstance(seen, WorkerLost) else seen
            for worker, seen in found.items()
        ]

    def _each(self, method: str, words: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """What these workers say, those that take a lost one's place too; or that they are lost too often."""

        def ask(worker: int) -> tuple[int, Any]:
            reference = getattr(self._actors[worker], method).remote(*words[worker])
            return self._generations[worker], reference

        found: dict[int, Any] = {}
        asked = {worker: ask(worker) for worker in words}
        while asked:
            worker, (generation, reference) = next(iter(asked.items()))
            try:
                found[worker] = self._ray.get(reference)
            except self._ray.exceptions.RayTaskError as problem:
                raise CohortError(f"a worker failed: {_cause(problem)}") from problem
            except self._ray.exceptions.RayError as problem:
                try:
                    self._replace(worker, generation, problem)
                except WorkerLost as lost:
                    found[worker] = lost
                else:
                    asked[worker] = ask(worker)
                    continue
            del asked[worker]
        return found

    def exchange(
        self, request: Request, chain: Chain, work: Mapping[int, Sequence[Sequence[Seated]]], places: int
    ) -> Iterator[Delivery]:
        """Ask for all packets and give what comes of them, in the order in which they are done."""
        sent: dict[int | None, Any] = {None: self._ray.put(request)}
        asked: dict[Any, _Errand] = {}

        def ask(packet: _Errand) -> None:
            if packet.first not in sent:
                assert packet.first is not None
                sent[packet.first] = self._ray.put(request.starting_at(packet.first, chain))
            actor = self._actors[packet.worker]
            reference = actor.answer.remote(sent[packet.first], list(packet.leaves), places)
            asked[reference] = packet

        for worker, packets in work.items():
            for leaves in packets:
                ask(_Errand(worker, self._generations[worker], leaves))
        while asked:
            (reference,), _ = self._ray.wait(list(asked), num_returns=1)
            packet = asked.pop(reference)
            try:
                result: Packet | Needs = self._ray.get(reference)
            except self._ray.exceptions.RayTaskError as problem:
                raise CohortError(f"a worker failed: {_cause(problem)}") from problem
            except self._ray.exceptions.RayError as problem:
                try:
                    self._replace(packet.worker, packet.generation, problem)
                except WorkerLost as lost:
                    yield Delivery(lost, packet.leaves, packet.catch_up, packet.again)
                    continue
                generation = self._generations[packet.worker]
                ask(replace(packet, generation=generation, again=packet.again + 1))
                continue
            if isinstance(result, Needs):
                fuller = request.starting_at(result.have, chain)
                if packet.first is not None and packet.first <= result.have:
                    raise CohortError(
                        f"a worker still lacks model blocks from {result.have} on after being sent them."
                    )
                clients = sum(len(names) for _, names in packet.leaves)
                catch_up = packet.catch_up + clients * fuller.nbytes
                ask(replace(packet, catch_up=catch_up, first=result.have))
                continue
            yield Delivery(result, packet.leaves, packet.catch_up, packet.again)

    def _replace(self, worker: int, generation: int, problem: Exception) -> None:
        """Let another worker take the place of one that is lost, unless that has happened too often."""
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
        """End the workers, and the connection where it was made here."""
        if not self._ray.is_initialized():
            return
        for actor in getattr(self, "_actors", ()):
            self._ray.kill(actor)
        self._actors = []
        if self._started:
            self._ray.shutdown()


def gpu_share(machines: Sequence[tuple[int, int]], workers: int) -> float:
    """How much of a GPU each of so many workers can have; machines: CPUs, one for a worker, and GPUs of each.

    Rounded down to Ray's four digits, so that all parts of a GPU fit on it.
    """
    for each in range(1, workers + 1):
        if sum(min(cpus, gpus * each) for cpus, gpus in machines) >= workers:
            break
    return int(10_000 / each) / 10_000


def _cause(problem: Exception) -> str:
    """The last line of an error that came from another process."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return lines[-1] if lines else type(problem).__name__
