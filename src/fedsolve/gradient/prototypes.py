"""Class prototypes: the mean feature of each class at a client, as (classes, width) with a count of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fedsolve.backends.torch_later import F, Tensor, torch
from fedsolve.gradient import networks
from fedsolve.gradient.kfac import weight_names
from fedsolve.gradient.learners import SingleNetwork

if TYPE_CHECKING:
    from fedsolve.gradient.group import ClientGroup


def class_means(group: ClientGroup, client: int, features: Callable[[Tensor], Tensor]) -> Tensor:
    """Mean of `features(inputs)` over a client's rows of each class, (classes, width).

    Rows of classes that the client does not have are zero; `group.class_counts` tells which.
    """
    counts = group.class_counts[client]
    sums = counts.new_zeros((group.classes, head_width(group)))
    with torch.no_grad():
        for inputs, targets in group.rows.of(client):
            # A product, not an indexed sum: a GPU adds those in an order that varies.
            sums += F.one_hot(targets, group.classes).to(sums.dtype).mT @ features(inputs)
    return sums / counts.clamp(min=1).unsqueeze(-1)


def head_names(group: ClientGroup) -> list[str]:
    """Names of the classifier's weight and bias among the trained weights."""
    if not isinstance(group.learners, SingleNetwork):
        return group.names[-2:]
    return [name for name in weight_names(*networks.head_of(group.learners.network)) if name in group.names]


def base_names(group: ClientGroup) -> list[str]:
    """Names of the other trained weights."""
    heads = head_names(group)
    return [name for name in group.names if name not in heads]


def head_width(group: ClientGroup) -> int:
    """Features that enter the classifier."""
    if isinstance(group.learners, SingleNetwork):
        return networks.head_of(group.learners.network)[1].in_features
    return int(group.learners.weights[-2].shape[-1])
