"""Leaving and joining, with papers that anybody can check offline.

A withdrawal is signed by the site that leaves. It accepts that the last total less the next one is its own
sum, or it asks for noise. Sites that have entered it (`Ledger.withdraw`) sum again without the leaver, in
fresh slots: bit for bit the model without it, or, where it asks for noise, a private one (`fs.Private`).

A certificate says what became of it: the opening of both trainings, both cohorts, SHA-256 of both model
files and of all totals that they were solved from, the epsilon that the model cost. Everybody in the new
cohort signs it, and so does the server.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsolve.container import canonical_json, read
from fedsolve.errors import DataError, ModelFileError
from fedsolve.federation.engine import Federation
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.method import Method
from fedsolve.federation.participant import Participant
from fedsolve.federation.recipe import Recipe
from fedsolve.model import Model
from fedsolve.privacy.primitives import Sign, Verify, signed_by
from fedsolve.privacy.secure import SecureFederation

SERVER = "server"
_TAG = b"fedsolve paper 1\n"
DIFFERENCE = "its own sum can be computed as a difference"
NOISE = "only private runs are summed without it"


@dataclass(frozen=True)
class Paper:
    """Facts, and who signed them."""

    facts: Mapping[str, Any]
    signatures: Mapping[str, str] = field(default_factory=dict)

    @property
    def message(self) -> bytes:
        """What is signed."""
        return _TAG + canonical_json(self.facts).encode()

    def signed(self, name: str, sign: Sign) -> Paper:
        """The same with one signature more."""
        return Paper(self.facts, {**self.signatures, name: sign(self.message).hex()})

    def check(self, signers: Sequence[str], verify: Verify) -> None:
        """Refuse the paper, by name, unless all of these have signed it as it is."""
        for name in signers:
            if name not in self.signatures:
                raise ModelFileError(f"the signature of '{name}' is missing.")
            if not signed_by(verify, name, self.message, self.signatures[name]):
                raise ModelFileError(f"'{name}' did not sign this: it was changed, or the key is another.")

    def to_text(self) -> str:
        return json.dumps({"facts": self.facts, "signatures": self.signatures}, indent=1) + "\n"

    @classmethod
    def from_file(cls, path: str | Path) -> Paper:
        try:
            note = json.loads(read(path))
            facts, signatures = note["facts"], note["signatures"]
            if not isinstance(facts, dict) or not all(isinstance(s, str) for s in signatures.values()):
                raise TypeError("no facts")
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise ModelFileError(f"{path} is no paper of fedsolve ({type(problem).__name__}).") from problem
        return cls(facts, signatures)


def withdrawal(site: str, cohort: Sequence[str], noise: bool = False) -> Paper:
    """What a site signs that leaves this cohort. noise: it asks for noise that hides its own sum."""
    accepts = NOISE if noise else DIFFERENCE
    return Paper({"paper": "withdrawal", "site": site, "cohort": sorted(cohort), "accepts": accepts})


def check_withdrawal(paper: Paper, verify: Verify) -> str:
    """The site that leaves; refused unless it signed."""
    if paper.facts.get("paper") != "withdrawal" or paper.facts.get("accepts") not in (DIFFERENCE, NOISE):
        raise ModelFileError("this paper is no withdrawal.")
    site = str(paper.facts["site"])
    paper.check([site], verify)
    return site


def forget(
    of: Method[Any] | Recipe[Any],
    federation: Federation,
    site: str,
    paper: Paper | None = None,
    verify: Verify | None = None,
    **settings: Any,
) -> Model:
    """The model of those who stay, bit for bit what it would be had the site never been there.

    They sum again, whatever the method. In secure sums they do so only with the site's signed withdrawal
    (`paper`, checked by `verify`). settings: as of `fit`.
    """
    inner = _in_process(federation)
    if isinstance(federation, SecureFederation):
        if paper is None or verify is None:
            raise ModelFileError(f"in secure sums '{site}' leaves with its signed withdrawal only.")
        if check_withdrawal(paper, verify) != site or {*paper.facts["cohort"]} != {*inner.clients}:
            raise ModelFileError(f"this is no withdrawal of '{site}' from {', '.join(inner.clients)}.")
        federation.withdrawn(site, paper.facts["cohort"], paper.facts["accepts"] == NOISE)
    inner.remove(site)
    model: Model = of.fit(federation, **settings)
    return model


def add(
    of: Method[Any] | Recipe[Any], federation: Federation, *newcomers: Participant, **settings: Any
) -> Model:
    """The model of everybody together with newcomers, as if they had been there from the start.

    Secure sums refuse fewer than three at once, and three where sites do not allow changes.
    """
    inner = _in_process(federation)
    for one in newcomers:
        inner.add(one)
    model: Model = of.fit(federation, **settings)
    return model


def _in_process(federation: Any) -> LocalFederation:
    inner = federation.federation if isinstance(federation, SecureFederation) else federation
    if not isinstance(inner, LocalFederation):
        raise DataError(
            f"sites of a {type(inner).__name__} leave where they are: fedsolve certificate withdraw and "
            "accept; then the server trains again without them."
        )
    return inner


def certificate(models: Sequence[tuple[Model, bytes]], leaving: Paper | None = None) -> Paper:
    """What is to be signed about the models before and after, each with the bytes of its file."""
    sides = []
    for model, data in models:
        card = model.card or {}
        if "cohort" not in card or len(card["cohort"]) != card["clients"]:
            raise ModelFileError("a certificate needs models that name their sites (at most 50 of them).")
        opening = canonical_json([card["method"], card["parameters"]]).encode()
        sides.append(
            {
                "cohort": sorted(card["cohort"]),
                "model": hashlib.sha256(data).hexdigest(),
                "opening": hashlib.sha256(opening).hexdigest(),
                "epsilon": (card.get("privacy") or {}).get("epsilon"),
                "totals": card.get("totals"),
            }
        )
    before, after = sides
    if before["opening"] != after["opening"]:
        raise ModelFileError("the two models were trained with other methods or parameters.")
    paper = None if leaving is None else {"facts": leaving.facts, "signatures": leaving.signatures}
    return Paper({"paper": "certificate", "before": before, "after": after, "withdrawal": paper})


def check_certificate(paper: Paper, verify: Verify, model: bytes | None = None) -> dict[str, Any]:
    """What a certificate says, as names; refused where anything in it does not hold."""
    facts = paper.facts
    if facts.get("paper") != "certificate":
        raise ModelFileError("this paper is no certificate.")
    before, after = (set(facts[side]["cohort"]) for side in ("before", "after"))
    left, joined = sorted(before - after), sorted(after - before)
    if not left and not joined:
        raise ModelFileError("nobody left and nobody joined: both cohorts are the same.")
    note = facts["withdrawal"]
    if left:
        if note is None:
            raise ModelFileError(f"the withdrawal of {left} is missing.")
        paper_of = Paper(note["facts"], note["signatures"])
        site = check_withdrawal(paper_of, verify)
        if left != [site] or set(paper_of.facts["cohort"]) != before:
            raise ModelFileError(f"the withdrawal is of '{site}' from another cohort; {left} left this one.")
    paper.check([*sorted(after), SERVER], verify)
    if model is not None and hashlib.sha256(model).hexdigest() != facts["after"]["model"]:
        raise ModelFileError("the certificate is of another model.")
    kept = {name: facts["after"][name] for name in ("epsilon", "model")}
    return {"left": left, "joined": joined, "cohort": sorted(after), **kept}
