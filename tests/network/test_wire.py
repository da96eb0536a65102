"""Terms as bytes on their way."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedsolve import version
from fedsolve.errors import TermError
from fedsolve.federation.encoding import encode_term, read_term
from fedsolve.federation.messages import Needs, Term


@pytest.mark.parametrize("field", ['"have":Infinity', '"have":1e999', '"have":' + "[" * 100_000])
def test_numbers_without_an_end_are_refused(field):
    note = '{"wire":2,"message":"needs",' + field + "}"
    head = json.dumps({"__metadata__": {"fedsolve": note}}).encode()
    with pytest.raises(TermError):
        read_term(np.frombuffer(len(head).to_bytes(8, "little") + head, dtype=np.uint8))


def test_needs_and_damage():
    assert read_term(np.frombuffer(encode_term(Needs(3)), dtype=np.uint8)) == Needs(3)
    whole = np.frombuffer(encode_term(Term({"gram": np.eye(5)}, {"rows": 1})), dtype=np.uint8)
    for size in range(0, len(whole), 7):
        with pytest.raises(TermError):
            read_term(whole[:size])
    ours, other = (f'wire\\":{version}'.encode() for version in (version.MESSAGE, version.MESSAGE + 1))
    with pytest.raises(TermError, match="wire version"):
        read_term(np.frombuffer(whole.tobytes().replace(ours, other), dtype=np.uint8))
