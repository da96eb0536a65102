"""Parameters of a gradient method that do not go together, or not with what the method declares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsolve.errors import DataError
from fedsolve.gradient.alignment import CHOICES

if TYPE_CHECKING:
    from fedsolve.gradient.gradient_method import GradientMethod


def check(method: GradientMethod) -> None:
    """Refuse such parameters."""
    name, colon, _ = (type(method).__doc__ or "").partition(":")
    name = name if colon and " " not in name else type(method).__name__
    owner = next(kind for kind in type(method).__mro__ if "update" in vars(kind))
    other, chosen = method.optimiser != "sgd", method.feedback in CHOICES
    measure = "track" if method.track == "drift" else "feedback"
    for is_refused, why in (
        (
            other and method.momentum,
            f"momentum ({method.momentum}) is of the optimiser sgd; {method.optimiser} has moments of its "
            "own. Leave it out.",
        ),
        (
            method.nesterov and not method.momentum,
            "nesterov is a form of momentum; give momentum, such as 0.9.",
        ),
        (
            method.server_step != 1 and not vars(owner).get("averages", False),
            f"server_step is for methods that take the mean of the clients' weights; {name} updates its "
            "weights in its own way. Leave it out.",
        ),
        (
            method.one_shot and method.rounds != 1,
            f"{name} takes one round of long local training; got rounds={method.rounds}. Raise epochs "
            "instead.",
        ),
        (
            method.one_shot and chosen,
            f"feedback='{method.feedback}' chooses layers by the round before, and {name} has one round. "
            "Name the layers, joined by commas.",
        ),
        (
            method.stays and (chosen or method.track == "drift"),
            f"{measure}={getattr(method, measure)!r} sends updates of all weights, and in {name} the "
            f"{method.stays} never leaves its client. Leave {measure} out.",
        ),
        (
            method.hidden and method.network == "linear",
            f"network 'linear' is a classifier without hidden layers, and {name} {method.hidden}. Take one "
            "that has some, such as mlp:256.",
        ),
    ):
        if is_refused:
            raise DataError(why)
