"""Several processes on one GPU: side by side through NVIDIA's MPS where it can be used, else taking turns.

Without MPS the kernels of different processes never run at the same time, and those of a small network leave
most of a large GPU idle. The daemon belongs to the one who starts it, listens in a folder of its own and is
stopped at the end; the GPU's compute mode is left alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PLACES = ("/usr/local/nvidia/bin", "/usr/bin", "/usr/local/cuda/bin", "/opt/bin")
TRY = "import torch; print(torch.ones(1, device='cuda').item())"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
LEAST = 12.0
"""Seconds that must be left for another process to be started."""


def tell(text: str) -> None:
    """A line on stderr, so that a person sees what is going on."""
    print(f"  {text}", file=sys.stderr, flush=True)


@contextmanager
def shared_gpu(how: str) -> Iterator[dict[str, str]]:
    """The environment in which processes share a GPU: "mps" or "processes"; "auto" is MPS where it works.

    Where MPS is asked for and cannot be used, it is said, and the processes take turns.
    """
    control = None if how == "processes" else _control()
    if control is None:
        if how == "mps":
            tell(f"no {CONTROL} on this machine: processes take turns on the GPU.")
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in own.values():
            Path(path).mkdir()
        problem = _started(control, own)
        try:
            if problem is not None:
                tell(f"MPS cannot be used here ({problem}): processes take turns on the GPU.")
            yield {} if problem is not None else own
        finally:
            _called([control], own, "quit\n")


@dataclass
class Job:
    """One process to run: the words after `python -m MODULE`, and the file that takes what it says."""

    words: Sequence[str]
    log: Path
    failed: int = 0


def run_jobs(
    module: str, jobs: Sequence[Job], at_once: int, sharing: Mapping[str, str], until: float
) -> bool:
    """Run the jobs, some at once, starting none when little time is left; whether none failed for good.

    until: `time.time()` by which the processes end by themselves. One that fails is tried once more, and then
    without sharing the GPU.
    """
    waiting, running, good = deque(jobs), {}, True
    while waiting or running:
        while waiting and len(running) < at_once and until - time.time() > LEAST:
            job = waiting.popleft()
            environment = os.environ | ONE_THREAD | ({} if job.failed else dict(sharing))
            with job.log.open("a") as log:
                command = [sys.executable, "-m", module, *job.words]
                running[subprocess.Popen(command, stdout=log, stderr=log, env=environment)] = job
        if not running:
            tell(f"no time is left for {len(waiting)} of {len(jobs)} processes.")
            break
        time.sleep(0.2)
        for process in [process for process in running if process.poll() is not None]:
            job = running.pop(process)
            if process.returncode == 0:
                continue
            tell(f"exit status {process.returncode}: {' '.join(job.words)}\n{job.log.read_text()[-1500:]}")
            job.failed += 1
            good = good and job.failed < 2
            if job.failed < 2:
                waiting.append(job)
    return good


def _control() -> str | None:
    found = shutil.which(CONTROL)
    for place in PLACES:
        path = Path(place) / CONTROL
        if found is None and path.is_file():
            found = str(path)
    return found


def _started(control: str, own: Mapping[str, str]) -> str | None:
    """Start the daemon and try it with a process; what was wrong, None when nothing was."""
    problem = _called([control, "-d"], own)
    return problem or _called([sys.executable, "-c", TRY], own)


def _called(command: list[str], own: Mapping[str, str], given: str = "") -> str | None:
    """Run a command to its end; what was wrong with it."""
    try:
        done = subprocess.run(
            command, env=os.environ | dict(own), input=given, capture_output=True, text=True, timeout=90
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return str(problem)
    said = (done.stderr or done.stdout).strip().splitlines()
    return None if done.returncode == 0 else (said[-1] if said else f"exit status {done.returncode}")
