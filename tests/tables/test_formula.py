"""Expressions of formulas."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fedsolve.tables.formula import check


class Circle:
    """What only the collector of cyclic garbage finds, and lets other threads run while it is thrown away."""

    def __init__(self) -> None:
        self.again = self

    def __del__(self) -> None:
        for _ in range(50):
            pass


@pytest.fixture
def collecting() -> Iterator[None]:
    """Threads take turns all the time, in the middle of a parsed expression too."""
    every, turns = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(20)
    sys.setswitchinterval(1e-6)
    yield
    gc.set_threshold(*every)
    sys.setswitchinterval(turns)


@pytest.mark.usefixtures("collecting")
def test_expressions_are_read_in_several_threads() -> None:
    """Python 3.11: SystemError, AST constructor recursion depth mismatch."""

    def read(_: int) -> None:
        Circle()
        check("log(a) + floor(b / 9) + I((a > 8) * (a < 10))", ["a", "b"])

    with ThreadPoolExecutor(3) as pool:
        assert len([*pool.map(read, range(1200))]) == 1200
