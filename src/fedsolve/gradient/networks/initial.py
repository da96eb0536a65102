"""Initial weights from a generator of their own; torch's global generator is neither read nor moved.

The modules are made on the meta device, where torch draws nothing, and filled here in registration
order. So equal seeds give equal bits whatever other threads draw in the meantime.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from fedsolve.arrays import stream
from fedsolve.backends.torch_later import nn, torch

# How weights start. zero: all zero. torch: torch's own defaults. he: convolutions normal with variance
# 2 / fan_out, linear layers as torch. small head: as he, but linear layers normal with standard deviation
# 0.01 and bias zero.
Rule = Literal["zero", "torch", "he", "small head"]


def network_seed(seed: int) -> int:
    """The seed of a torch generator (63 bits) for initial weights."""
    return int(stream(seed, "network").integers(2**63))


def made(make: Callable[[], nn.Module], rule: Rule, seed: int) -> nn.Module:
    """The network that `make` lays out, in float32 on the processor, filled by `rule` from `seed`."""
    # The generator comes first: inside the context it could only be one of the meta device.
    generator = torch.Generator("cpu").manual_seed(network_seed(seed))
    with torch.device("meta"):
        network = make()
    network.to_empty(device="cpu")
    with torch.no_grad():
        for module in network.modules():
            _fill(module, rule, generator)
    return network


def _fill(module: nn.Module, rule: Rule, generator: torch.Generator) -> None:
    if isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
        module.reset_parameters()
    elif isinstance(module, nn.Conv2d) and rule in ("he", "small head"):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=generator)
        assert module.bias is None
    elif isinstance(module, nn.Linear) and rule == "small head":
        module.weight.normal_(0.0, 0.01, generator=generator)
        module.bias.zero_()
    elif isinstance(module, nn.Linear) and rule == "zero":
        module.weight.zero_()
        module.bias.zero_()
    elif isinstance(module, nn.Conv2d | nn.Linear):
        # What torch itself does: both uniform in ±1 / sqrt(fan_in).
        nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5.0), generator=generator)
        if module.bias is not None:
            bound = 1.0 / math.sqrt(module.weight[0].numel())
            nn.init.uniform_(module.bias, -bound, bound, generator=generator)
    else:
        # Otherwise uninitialised memory would go unnoticed until the weights turn out to be noise.
        assert not any(True for _ in module.parameters(recurse=False)), type(module)
