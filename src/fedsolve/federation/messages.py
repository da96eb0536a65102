"""What travels: requests down, terms up, and the total that a method sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.backends import NUMPY, Kernels, host, kernels_of
from fedsolve.container import digest
from fedsolve.errors import TermError

_TRIANGLE_ROWS = 128


@dataclass(frozen=True)
class Block:
    """One addition to the model so far: a JSON note and named arrays."""

    note: Mapping[str, Any]
    arrays: Mapping[str, Array] = field(default_factory=dict)


class Chain:
    """The model so far as an append-only list of blocks; both sides hold one and compare digests.

    Block 0 is the opening (method, parameters, classes); every later one is what an exchange
    added. A request names its position in the chain and carries only the blocks that are new.

    opening: what both sides agreed on before the first answer; empty where no run has begun.
    """

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self.blocks: list[Block] = []
        self.opening: dict[str, Any] = {}
        self.digests: list[str] = [""]
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def digest(self) -> str:
        return self.digests[-1]

    def append(self, block: Block) -> None:
        self.digests.append(digest(block.note, block.arrays, self.digests[-1]))
        if not self.blocks:
            self.opening = block.note.get("opening", {})
        self.blocks.append(block)

    def copy(self, position: int) -> Chain:
        """The same model up to this position, as a chain of its own; the blocks are shared."""
        chain = Chain()
        chain.blocks, chain.digests = self.blocks[:position], self.digests[: position + 1]
        chain.opening = self.opening if chain.blocks else {}
        return chain

    def accept(self, request: Request) -> bool:
        """Bring this chain to the request's position; False when earlier blocks are missing.

        Blocks that turn out not to continue this chain clear it, so that the next question is
        for everything.
        """
        position = request.position
        if position == 0:  # a question that needs no model, such as an evaluation, leaves it alone
            return True
        known = len(self.blocks) >= position and self.digests[position] == request.digest
        first = position if known else position - len(request.blocks)
        if first < 0:
            raise TermError(f"{len(request.blocks)} blocks of a model of {position} were sent.")
        if len(self.blocks) < first:
            return False
        del self.blocks[first:], self.digests[first + 1 :]
        if not self.blocks:
            self.opening = {}
        for block in () if known else request.blocks:
            self.append(block)
        if self.digests[-1] == request.digest:
            return True
        if first == 0:
            raise TermError(
                f"exchange {request.exchange}: the model blocks received do not have the digest the "
                "request names; they were damaged on the way. Send the request again."
            )
        del self.blocks[:], self.digests[1:]
        self.opening = {}
        return False


@dataclass(frozen=True)
class Request:
    """What the server asks in one exchange: a kind, a step, and the arrays needed to answer.

    `cohort` is who is asked; it steers the engine and is not sent. `blocks` are the newest blocks
    of the model, ending at `position`, whose digest is `digest`. `sizes()` bounds the numbers of every term,
    by array, where that follows from earlier totals; it is for engines that need it, and not sent either.
    """

    kind: str
    exchange: int
    step: int
    cohort: tuple[str, ...]
    note: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)
    position: int = 0
    digest: str = ""
    blocks: tuple[Block, ...] = ()
    sizes: Callable[[], Mapping[str, float]] = dict

    @property
    def first(self) -> int:
        """The position in the chain of the first block that this request carries."""
        return self.position - len(self.blocks)

    @property
    def nbytes(self) -> int:
        """Payload: bytes of all arrays sent."""
        sent = [self.arrays, *(block.arrays for block in self.blocks)]
        return sum(array.nbytes for arrays in sent for array in arrays.values())

    def starting_at(self, first: int, chain: Chain) -> Request:
        """The same request carrying every block from chain position `first` on."""
        return replace(self, blocks=tuple(chain.blocks[first : self.position]), sizes=dict)


@dataclass(frozen=True)
class Needs:
    """A participant's answer when it lacks earlier blocks: send everything from `have` on."""

    have: int


@dataclass
class Term:
    """A client's answer: named arrays and counts, to be added to those of others.

    symmetric: names of square matrices of which only the upper triangle counts, until a total is made whole
        (`mirror`). Each is that matrix or, as it travels, the vector of its upper triangle, row by row.
    factors: by array name, a number that multiplies the array in the sum, 1 where none is given. The
        product is formed in float64, so that float32 weights times a row count keep all their digits.
    """

    arrays: dict[str, Array] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    symmetric: frozenset[str] = frozenset()
    factors: dict[str, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Payload: bytes of the arrays as they are sent, symmetric ones as a triangle."""
        return sum(
            array.itemsize * (len(array) * (len(array) + 1) // 2)
            if n in self.symmetric and array.ndim == 2
            else array.nbytes
            for n, array in self.arrays.items()
        )

    def add(self, other: Term, sign: int = 1) -> None:
        """Add `sign * other` in place; arrays of one name must have one shape, the others are taken over."""
        for name in [name for name in other.arrays if name in self.arrays]:
            mine, theirs = self.arrays[name], other.arrays[name]
            if mine.shape != theirs.shape or (name in self.symmetric) != (name in other.symmetric):
                kinds = ["symmetric" if name in t.symmetric else "plain" for t in (other, self)]
                raise TermError(
                    f"terms do not fit together: '{name}' has shape {theirs.shape} ({kinds[0]}), expected "
                    f"{mine.shape} ({kinds[1]}). All participants must answer the same request."
                )
        for name in [name for name in self.factors if name in other.arrays]:
            self.arrays[name] = _times(self.arrays[name], self.factors.pop(name))
        for name, array in other.arrays.items():
            summed, factor = self.arrays.get(name), sign * other.factors.get(name, 1)
            if summed is None:
                # A float32 term is summed in float64: the sum, not the addend, sets the error.
                self.arrays[name] = _times(array, factor)
                continue
            parts: list[Any] = [np.s_[...]]
            if name in self.symmetric and summed.ndim == 2:
                starts = range(0, len(summed), _TRIANGLE_ROWS)
                parts = [np.s_[row : row + _TRIANGLE_ROWS, row:] for row in starts]
            for part in parts:  # in place, with products in float64; a factor of 1 or -1 needs no product
                target = summed[part]
                on_host = isinstance(target, np.ndarray)
                here = host(array[part]) if on_host else kernels_of(target).array(array[part])
                if factor == 1:
                    target += here
                elif factor == -1:
                    target -= here
                else:
                    target += _times(here, factor)
        for name, count in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + sign * count
        self.symmetric |= other.symmetric

    def __add__(self, other: Term, sign: int = 1) -> Term:
        total = Term()
        total.add(self)
        total.add(other, sign)
        return total

    def __sub__(self, other: Term) -> Term:
        return self.__add__(other, -1)

    def check_finite(self, *clients: str) -> None:
        """Refuse NaN and infinity, by name: one bad term would spoil the sum for everyone."""
        places: dict[Kernels, list[str]] = {}
        for name, array in self.arrays.items():
            places.setdefault(kernels_of(array), []).append(name)
        for kernels, names in places.items():  # each device is waited for once
            finite = kernels.finite_sums([self.arrays[name] for name in names])
            if not all(finite):
                raise TermError(
                    f"{named(clients)}: '{names[finite.index(False)]}' contains NaN or infinite values. "
                    "Check its features for values whose squares overflow; rescale such columns."
                )

    def on_host(self) -> Term:
        """This term with every array in the host's memory."""
        self.arrays = {name: host(array) for name, array in self.arrays.items()}
        return self

    def packed(self) -> Term:
        """This term as it travels: in the host's memory, symmetric arrays as triangles."""
        self.on_host()
        arrays = {
            name: pack_triangle(array) if name in self.symmetric and array.ndim == 2 else array
            for name, array in self.arrays.items()
        }
        return Term(arrays, self.counts, self.symmetric, self.factors)

    def mirror(self) -> Term:
        """This term, every symmetric array unpacked and its upper triangle copied into the lower one."""
        for name in self.symmetric:
            array = self.arrays[name]  # nothing else may refer to a packed one, which is freed here
            self.arrays[name] = unpack_triangle(array) if array.ndim == 1 else kernels_of(array).mirror(array)
        return self


@dataclass
class Total:
    """The sum of terms with the cohort it was summed over, who was missing and why.

    error_bounds: by array, how far a sum in a ring can be from the exact one; plain sums give none.
    noised: of a private run, the sites asked, where each has added its share of the noise; else 0.
    digest: of a sum in a ring, SHA-256 of its arrays and counts.
    noise: of a private run, by array, the deviation of its noise.
    """

    term: Term
    cohort: tuple[str, ...]
    missing: dict[str, str] = field(default_factory=dict)
    empty: tuple[str, ...] = ()
    bytes_up: int = 0
    bytes_down: int = 0
    catch_up_bytes: int = 0
    seconds: float = 0.0
    error_bounds: Mapping[str, float] = field(default_factory=dict)
    noised: int = 0
    digest: str = ""
    noise: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Array:
        found: Array = self.on(NUMPY, name)
        return found

    def on(self, kernels: Kernels, name: str) -> Any:
        """The array of this name, copied to where these kernels compute."""
        found = self.term.arrays.get(name)
        if found is None:
            raise TermError(
                f"the total lacks '{name}'; it has {sorted(self.term.arrays)}. "
                "The participants answered another request."
            )
        return kernels.array(found if kernels_of(found) is kernels else host(found))

    def count(self, name: str) -> int:
        return self.term.counts.get(name, 0)

    def including(self, client: str, term: Term) -> Total:
        """This total with a late client's term: exact for methods of one exchange."""
        if client in self.cohort:
            raise TermError(f"client '{client}' is already part of this total.")
        return Total((self.term + term).mirror(), tuple(sorted([*self.cohort, client])))

    def without(self, client: str, term: Term) -> Total:
        """This total after a client withdrew its term: exact for methods of one exchange."""
        if client not in self.cohort:
            raise TermError(f"client '{client}' is not part of this total; it cannot be withdrawn.")
        return Total((self.term - term).mirror(), tuple(sorted({*self.cohort} - {client})))


def named(clients: tuple[str, ...]) -> str:
    """One client by its name, several by the first and the last."""
    return f"'{clients[0]}'" if len(clients) == 1 else f"'{clients[0]}' to '{clients[-1]}'"


def pack_triangle(matrix: Array) -> Array:
    """Upper triangle as one vector, row slice by row slice."""
    if len({*matrix.shape}) > 1:
        raise TermError(f"a symmetric array is square; got {matrix.shape[0]} x {matrix.shape[1]} numbers.")
    return np.concatenate([matrix[row, row:] for row in range(len(matrix))] or [matrix.ravel()])


def check_triangle(packed: Array) -> int:
    """The width of the matrix whose upper triangle is `packed`; other lengths are refused."""
    width = (int(np.sqrt(8 * packed.size + 1)) - 1) // 2
    if packed.ndim != 1 or width * (width + 1) // 2 != packed.size:
        raise TermError(f"{packed.size} numbers are not an upper triangle of any matrix.")
    return width


def unpack_triangle(packed: Array) -> Array:
    """The symmetric matrix whose upper triangle is `packed`."""
    width = check_triangle(packed)
    matrix = np.zeros((width, width), dtype=packed.dtype)
    start = 0
    for row in range(width):
        matrix[row, row:] = packed[start : start + width - row]
        start += width - row
    return NUMPY.mirror(matrix)


def _times(array: Array, factor: float) -> Array:
    if not isinstance(array, np.ndarray | np.generic):
        return array.double() * factor
    # numpy makes a plain number of a product without axes, which could not be added to in place.
    return np.asarray(np.multiply(array, factor, dtype=np.float64))
