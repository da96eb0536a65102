"""How many threads BLAS may use, for the length of a block of code."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, TypeVar

from threadpoolctl import ThreadpoolController

T = TypeVar("T")

Parts = Callable[[Callable[[slice], None], slice, int], None]
"""Calls a function for every part of a span; they have this length, the last may be shorter."""


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


@contextmanager
def in_parts() -> Iterator[Parts]:
    """Within this context: what calls a function for parts of a span, as many at a time as BLAS has threads.

    Each part has one thread of BLAS: those that share a product spin while they wait for each other, which on
    busy cores takes longer than the product. Lengths are the caller's, so no number depends on the cores.
    """
    threads = thread_count()
    with blas_threads(1 if threads > 1 else None), ThreadPoolExecutor(threads) as pool:

        def each(work: Callable[[slice], None], span: slice, length: int) -> None:
            starts = range(span.start, span.stop, length)
            parts = [slice(start, min(start + length, span.stop)) for start in starts]
            for _ in map(work, parts) if min(threads, len(parts)) < 2 else pool.map(work, parts):
                pass

        yield each


def thread_count() -> int:
    """How many threads BLAS may use here and now."""
    libraries = _controller().select(user_api="blas").lib_controllers
    return max((int(library.num_threads) for library in libraries), default=1)


def usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every platform
        return os.cpu_count() or 1
