"""Methods that are solved, not descended: numpy and scipy, float64."""

from fedsolve.closedform import meanings as _  # noqa: F401 - registers itself
