"""Networks on features: one linear layer ("linear"), or hidden layers before it ("mlp:256,128")."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

from fedsolve.backends.torch_later import nn
from fedsolve.errors import DataError

DEFAULT_HIDDEN = (256,)


def hidden_widths(option: str | None) -> tuple[int, ...]:
    """The widths in "W1,W2,..." (what follows "mlp:"), "WxN" standing for N times W; (256,) without any."""
    if option is None:
        return DEFAULT_HIDDEN
    widths: list[int] = []
    for part in option.split(","):
        width, times, count = (word.strip() for word in part.partition("x"))
        numbers = [width, count] if times else [width]
        if not all(number.isdecimal() and int(number) > 0 for number in numbers):
            raise DataError(
                f"network 'mlp:{option}': give positive widths separated by commas, such as mlp:256 or "
                "mlp:512,128, or one of them several times, such as mlp:1024x5."
            )
        widths += [int(width)] * (int(count) if times else 1)
    return tuple(widths)


def stack(widths: list[int]) -> nn.Module:
    """Linear layers of these widths with ReLU between them: hidden1, hidden2, ..., classifier."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for index, (inputs, outputs) in enumerate(pairwise(widths[:-1]), 1):
        layers[f"hidden{index}"] = nn.Linear(inputs, outputs)
        layers[f"relu{index}"] = nn.ReLU(inplace=True)
    layers["classifier"] = nn.Linear(widths[-2], widths[-1])
    return nn.Sequential(layers)


def weight_names(layers: int) -> list[str]:
    """Names of the weights of `stack` with so many linear layers, in the order in which they are used."""
    names = [*(f"hidden{index}" for index in range(1, layers)), "classifier"]
    return [f"{name}.{part}" for name in names for part in ("weight", "bias")]
