"""Any method trained on a part of every client's rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from fedsolve.federation.engine import Federation, Spec
from fedsolve.federation.method import Method, Run
from fedsolve.federation.parts import Part
from fedsolve.model import Model

M = TypeVar("M", bound=Model)


@dataclass(frozen=True)
class OnPart(Method[M]):
    """A method and the part of the rows that it is trained on: all but those held out, for instance."""

    key: ClassVar[str] = "on part"

    method: Method[M]
    part: Part

    def __post_init__(self) -> None:
        """Both were checked when they were made."""

    def parameters(self) -> dict[str, Any]:
        return self.method.parameters()

    def largest_side(self, spec: Spec) -> int:
        return self.method.largest_side(spec)

    def start(self, spec: Spec) -> Run[M]:
        run = self.method.start(spec)
        run.agree(self.part.note())
        return run

    def finished(self, model: M, federation: Federation) -> M:
        return self.method.finished(model, federation)
