"""How many threads BLAS may use, for the length of a block of code."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeVar

from threadpoolctl import ThreadpoolController

T = TypeVar("T")


@cache
def _controller() -> ThreadpoolController:
    # Finding the libraries takes milliseconds; numpy's and scipy's are loaded by now and stay.
    import numpy as _  # noqa: F401
    import scipy.linalg as _linalg  # noqa: F401

    return ThreadpoolController()


def blas_threads(limit: int | None) -> AbstractContextManager[Any]:
    """Within this context numpy and scipy use at most `limit` BLAS threads; None changes nothing."""
    if limit is None:
        return nullcontext()
    context: AbstractContextManager[Any] = _controller().limit(limits=limit, user_api="blas")
    return context


def run_beside(work: Callable[[], T]) -> Future[T]:
    """Start this in a thread of its own; for what the interpreter need not wait for."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as problem:  # whoever asks for the result learns of it
            found.set_exception(problem)

    threading.Thread(target=run, daemon=True).start()
    return found


def several_threads() -> bool:
    """Whether BLAS may use more than one thread here and now."""
    return any(library.num_threads > 1 for library in _controller().select(user_api="blas").lib_controllers)


def usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every platform
        return os.cpu_count() or 1
