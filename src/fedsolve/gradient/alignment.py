"""Which layers feedback alignment acts on, and how far clients drift: functions of sums of updates.

Alignment of a layer (FLFA, Eq. 14): z = mean over clients of cos(g_i, mean of g), g_i the client's update
of the layer's weight. Clients send g_i and g_i / ||g_i||, and the two sums give

    z = <sum of g_i / ||g_i||, sum of g_i> / (K ||sum of g_i||)

so nobody sees an update of one client. A sketch makes both short. A layer that has at most as many entries
as the sketch is sent as it is; in a larger one every entry gets a random sign, and the layer is folded, entry
i onto place i modulo an odd length. That is linear and keeps inner products without bias (the signs see to
it), and gives the same bits every time; z is then Eq. 14 of the sketched updates. The length is odd so that
the channels of a convolution, usually an even number of them, do not fall on the same places row after row.
Sums travel in the precision of the weights.

Sketch scheme 2: numpy's Philox bit generator keyed by the first 16 bytes (little endian) of
SHA-256("fedsolve sketch 2|seed|layer|size"); the lowest bits of its raw 64-bit integers, 0 for +1 and 1 for
-1; length: the largest odd number that is at most `sketch`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from fedsolve import version
from fedsolve.arrays import Array, check_choice, check_whole
from fedsolve.backends.torch_later import F, Tensor, torch
from fedsolve.errors import DataError

CHOICES = ("lowest", "highest", "skewness")
"""How layers are chosen from their scores."""

TIE = 6  # decimals of z that count: with one client every layer has z = 1 up to the rounding of float32


def weight_of(layer: str) -> str:
    """The name of a layer's weight; a network that is itself a layer has no name before it."""
    return f"{layer}.weight" if layer else "weight"


def alignment_sums(
    updates: Mapping[str, Array | Tensor], sketch: int = 0, seed: int = 0, precision: str = "float64"
) -> dict[str, Array]:
    """A client's part of the alignment sums: `update` and `direction`, layer after layer, and `moved`.

    updates:   of each layer's weight over the round, of any shape; W^r - w or w - W^r, z is the same.
    sketch:    0 sends them whole; else larger layers as a sketch of that length (one less when it is even).
    precision: that the sums travel in; they are computed in float64.
    A layer the client did not move gives zeros and is not counted in `moved`.
    """
    check_whole(0, sketch=sketch)
    flat = {layer: torch.as_tensor(update).double().reshape(-1) for layer, update in updates.items()}
    row = torch.cat([_folded(update, layer, sketch, seed) for layer, update in flat.items()]).cpu().numpy()
    parts = [row[span] for span in _spans({layer: len(update) for layer, update in flat.items()}, sketch)]
    norms = np.array([_norm(part) for part in parts])
    directions = [part / norm if norm else part for part, norm in zip(parts, norms, strict=True)]
    named = {"update": row, "direction": np.concatenate(directions), "moved": norms > 0}
    return {name: array.astype(precision) for name, array in named.items()}


def alignment_scores(
    arrays: Mapping[str, Array], sizes: Mapping[str, int], sketch: int = 0
) -> dict[str, float]:
    """z of each layer from the clients' summed arrays; layers nobody moved are left out.

    sizes: entries of each layer's weight, in the order in which the clients sent them.
    Updates that cancel to nothing have no mean direction and count as z = 0.
    """
    scores = {}
    for index, (layer, span) in enumerate(zip(sizes, _spans(sizes, sketch), strict=True)):
        moved = float(arrays["moved"][index])
        if moved == 0:
            continue
        update, direction = arrays["update"][span], arrays["direction"][span]
        norm = _norm(update)
        scores[layer] = float(direction @ (update / norm)) / moved if norm else 0.0
    return scores


def choose_layers(scores: Mapping[str, float], choice: str, count: int = 1) -> tuple[str, ...]:
    """The `count` layers with the lowest or highest z, most extreme first; ties go to the earlier layer.

    Layers whose z is not a number (a client diverged) are passed over.
    """
    check_choice("layer choice", choice, ("lowest", "highest"))
    check_whole(1, count=count)
    sign = 1 if choice == "lowest" else -1
    finite = [layer for layer, score in scores.items() if math.isfinite(score)]
    return tuple(sorted(finite, key=lambda layer: sign * round(scores[layer], TIE))[:count])


def skewness(scores: Mapping[str, float] | Sequence[float]) -> float:
    """Sample skewness m3 / m2^1.5 of the layers' z; 0 when they do not differ."""
    values = np.array(list(scores.values()) if isinstance(scores, Mapping) else scores, dtype=np.float64)
    if values.size == 0:
        return 0.0
    values = values - values.mean()
    second = float(np.mean(values**2))
    if math.sqrt(second) < 10.0**-TIE:
        return 0.0
    return float(np.mean(values**3) / second**1.5)


def choice_by_skewness(scores: Mapping[str, float] | Sequence[float]) -> Literal["lowest", "highest"]:
    """The rule of Sec. 13.2: most z low, with a tail to high values (positive skewness), means "lowest".

    The paper gives no formula; the sign is our reading of "skewed towards lower values".
    """
    return "lowest" if skewness(scores) > 0 else "highest"


def _spans(sizes: Mapping[str, int], sketch: int) -> list[slice]:
    """Where each layer lies in the row that is sent."""
    lengths = [_length(size, sketch) for size in sizes.values()]
    return [slice(end - length, end) for end, length in zip(np.cumsum(lengths), lengths, strict=True)]


def _length(size: int, sketch: int) -> int:
    """How many numbers are sent of a layer: all, or an odd number of at most `sketch`."""
    return sketch - 1 + sketch % 2 if 0 < sketch < size else size


def _folded(update: Tensor, layer: str, sketch: int, seed: int) -> Tensor:
    """What is sent of a layer's update, (entries,): the update itself, or its sketch where it is larger."""
    size = len(update)
    length = _length(size, sketch)
    if length == size:
        return update
    signed = update * _signs(seed, layer, size, update.device)
    # Rows of the sketch's length, the last one filled with zeros.
    rows = F.pad(signed, (0, -size % length)).reshape(-1, length)
    return rows.sum(dim=0)


@lru_cache(maxsize=256)
def _signs(seed: int, layer: str, size: int, device: torch.device) -> Tensor:
    """+1 and -1 for every entry of a layer; kept for the next client."""
    text = f"fedsolve sketch {version.SKETCHES}|{seed}|{layer}|{size}"
    start = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")
    bits = np.random.Philox(key=start).random_raw(size) & np.uint64(1)
    return torch.from_numpy(1 - 2 * bits.astype(np.int8)).to(device)


def mean_squared_drift(sum_updates: Mapping[str, Array] | Array, sum_squares: float, clients: float) -> float:
    """mean_i ||d_i - mean of d||² = sum ||d_i||² / K - ||sum d_i / K||².

    sum_updates: the unweighted sum of the clients' updates, one array or several by name.
    sum_squares: the sum of their squared norms.
    """
    if clients <= 0:
        raise DataError(f"drift needs at least one client; got {clients!r}.")
    parts = sum_updates.values() if isinstance(sum_updates, Mapping) else [sum_updates]
    square = 0.0
    for part in parts:
        mean = np.asarray(part, dtype=np.float64).ravel() / clients
        square += float(mean @ mean)
    # Equal updates may leave a rounding error below zero.
    return max(float(sum_squares) / clients - square, 0.0)


class Representation(NamedTuple):
    """How well features separate classes: distances within, between, and between / within."""

    intra: float
    inter: float
    ratio: float


def representation(features: Array, codes: Array) -> Representation:
    """Class separation of penultimate features (samples, width) with class codes (samples,), Eqs. 56-58.

    intra: mean over classes of the mean distance to the class centroid; inter: mean distance over pairs
    of centroids; ratio: inter / intra. Classes without samples are skipped; with a single class inter and
    ratio are not numbers.
    """
    from scipy.spatial.distance import pdist

    features, codes = np.asarray(features), np.asarray(codes)
    if features.ndim != 2 or codes.shape != features.shape[:1] or not len(codes):
        raise DataError(
            f"representation needs features (samples, width) and as many codes, at least one; "
            f"got {features.shape} and {codes.shape}."
        )
    centroids, within = [], []
    for code in np.unique(codes):
        rows = features[codes == code].astype(np.float64)
        centroids.append(rows.mean(axis=0))
        within.append(np.linalg.norm(rows - centroids[-1], axis=1).mean())
    intra = float(np.mean(within))
    inter = float(pdist(np.array(centroids)).mean()) if len(centroids) > 1 else math.nan
    if intra > 0:
        return Representation(intra, inter, inter / intra)
    return Representation(intra, inter, math.inf if inter > 0 else math.nan)


def _norm(values: Array) -> float:
    return math.sqrt(float(values @ values))
