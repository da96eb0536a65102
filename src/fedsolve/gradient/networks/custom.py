"""The user's own networks: made by a named function, or registered in this process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedsolve.backends.torch_later import GENERATOR, nn, torch
from fedsolve.data.backbones.preprocessing import digest_of
from fedsolve.data.backbones.torch_callable import weights_digest
from fedsolve.errors import DataError, did_you_mean, explained, require
from fedsolve.gradient.networks.initial import network_seed
from fedsolve.registry import check_allowed, imported

PREFIX = "custom"

_REGISTERED: dict[str, nn.Module] = {}
_SERIALS: dict[str, int] = {}


def register_network(module: nn.Module) -> str:
    """The name "custom:DIGEST" under which `build_network` gives copies of `module` in this process.

    The digest covers classes, layout, names, shapes and values of the weights and which of them are
    trained, not the code of `forward`: of modules that differ only there, the one registered last is
    meant. The weights are those of now; training the module later does not change what is registered.
    """
    require("torch", "torch", "registering a network")
    _check(module, "register_network")
    kept = _copied(module, "the module")
    kept.zero_grad(set_to_none=True)
    kinds = [
        f"{name} {type(part).__module__}.{type(part).__qualname__}" for name, part in kept.named_modules()
    ]
    names = [
        f"{name} {'trained' if value.requires_grad else 'frozen'}" for name, value in kept.named_parameters()
    ]
    layout = "\n".join([repr(kept), *kinds, *names])
    name = f"{PREFIX}:{digest_of([layout.encode(), weights_digest(kept).encode()])[:16]}"
    _REGISTERED[name] = kept
    _SERIALS[name] = serial(name) + 1
    return name


def serial(name: str) -> int:
    """How often a module was registered under `name`: each time it may have another `forward`."""
    return _SERIALS.get(name, 0)


def registered(name: str) -> nn.Module:
    """A copy of the module registered under `name`."""
    module = _REGISTERED.get(name)
    if module is None:
        raise DataError(
            f"network '{name}' is not registered in this process (registered: "
            f"{', '.join(sorted(_REGISTERED)) or 'none'}). Call register_network(module) first, with the "
            "same module and weights, or name a function as package.module:factory."
        )
    return _copied(module, f"network '{name}'")


def made_by(
    place: str, name: str, features: int, outputs: int, seed: int, known: tuple[str, ...]
) -> nn.Module:
    """What the function `name` of the module `place` returns for (features, outputs), drawn from `seed`."""
    address = f"network '{place}:{name}'"
    check_allowed("network", f"{place}:{name}")
    # Importing may draw too, but only once a process: the function starts from the seed again.
    with _drawing(seed):
        near = did_you_mean(f"{place}:{name}", known) or did_you_mean(place, known)
        module = imported(place, address, near, f"; networks that come with fedsolve are {', '.join(known)}")
    factory = getattr(module, name, None)
    if not callable(factory) or isinstance(factory, nn.Module):
        names = sorted(each for each, value in vars(module).items() if callable(value) and each[0] != "_")
        seen = "has no" if factory is None else f"has a {type(factory).__name__}, not a function,"
        raise DataError(
            f"{address}: {place} {seen} '{name}'.{did_you_mean(name, names)} Name a "
            "function of (features, outputs) that returns a torch.nn.Module."
        )
    remedy = "It must take (features, outputs) and return a torch.nn.Module."
    with _drawing(seed), explained(f"{address}: {name}({features}, {outputs}) failed", remedy):
        network = factory(features, outputs)
    _check(network, f"{address}: {name}({features}, {outputs})")
    # A function may hand out the same module each time; training must not reach through to it.
    return _copied(network, address)


def _check(network: Any, what: str) -> None:
    from torch.nn.parameter import is_lazy

    if not isinstance(network, nn.Module):
        raise DataError(f"{what} must give a torch.nn.Module; got {type(network).__name__}.")
    parameters = list(network.parameters())
    if any(is_lazy(parameter) for parameter in parameters):
        raise DataError(
            f"{what}: the {type(network).__name__} has lazy layers whose shapes are not known. Give their "
            "sizes, or run one batch through the module first."
        )
    if not any(parameter.requires_grad for parameter in parameters):
        raise DataError(
            f"{what}: the {type(network).__name__} has no parameter that requires a gradient, so there is "
            "nothing to train. Unfreeze some of it with requires_grad_(True)."
        )


def _copied(module: nn.Module, what: str) -> nn.Module:
    with explained(f"{what} cannot be copied", "Keep no results of a forward pass on it."):
        return copy.deepcopy(module)


@contextmanager
def _drawing(seed: int) -> Iterator[None]:
    """torch's global generators seeded, and put back afterwards."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with GENERATOR, torch.random.fork_rng(devices=devices), torch.device("cpu"):
        # Not torch.manual_seed, which would also seed devices that are not put back.
        torch.default_generator.manual_seed(network_seed(seed))
        yield
