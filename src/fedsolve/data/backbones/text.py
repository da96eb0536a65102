"""What networks that read text have in common: the tokenizer, how many tokens count, and who is cut short."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.container import canonical_json
from fedsolve.data.backbones.preprocessing import digest_of
from fedsolve.data.backbones.torch_callable import TorchBackbone

LENGTH = 512
"""Tokens that are read of a text where neither network nor tokenizer says how many."""

TOKENS = "a number of tokens, such as 256"

_PROBES = (
    "Heart-rate 72/min, NOT raised.",
    "Übelkeit seit gestern;  Fieber 38,5 °C",
    "心拍数は正常。 naïve\n42%",
)


@dataclass(frozen=True)
class Tokens:
    """What happens to a text before the network.

    tokenizer: digest of its vocabulary, and of what it makes of a few texts.
    length:    tokens that are read; the rest of a text is left out.
    prompt:    what stands before every text.
    """

    tokenizer: str
    length: int
    prompt: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class TextBackbone(TorchBackbone):
    """A network from texts to features; `embed` takes some texts and gives a tensor (texts, width)."""

    reads = "text"
    preprocessing: Tokens

    def __init__(
        self,
        name: str,
        module: Any,
        tokenizer: Any,
        length: int,
        identity: Mapping[str, Any],
        embed: Callable[[list[str]], Any],
        *,
        prompt: str = "",
        device: str = "cpu",
        licence: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        vocabulary = canonical_json(tokenizer.get_vocab()).encode()
        told = canonical_json([list(map(int, ids)) for ids in self._ids(_PROBES)]).encode()
        tokens = Tokens(digest_of([vocabulary, told]), length, prompt)
        super().__init__(name, module, tokens, identity, call=embed, device=device, licence=licence)

    def cut(self, texts: Sequence[str]) -> Array:
        """Which of the texts are longer than what is read of them."""
        whole = self._ids([self.preprocessing.prompt + text for text in texts])
        return np.array([len(ids) > self.preprocessing.length for ids in whole], dtype=bool)

    def _ids(self, texts: Sequence[str]) -> list[Any]:
        if not texts:
            return []
        if not callable(self._tokenizer):  # one of the package tokenizers itself
            return [found.ids for found in self._tokenizer.encode_batch(list(texts))]
        found: list[Any] = self._tokenizer(list(texts), truncation=False, verbose=False)["input_ids"]
        return found

    def _batch(self, rows: Sequence[Any]) -> Any:
        return list(rows)

    def _failing(self, batch: Any) -> tuple[str, str]:
        return f"{self.name} cannot process text", f"Check length ({self.preprocessing.length} tokens)."

    def _samples(self) -> list[Any]:
        # The second one is cut, so that a length that the network does not take is noticed at once.
        return ["blood pressure 120/80", "pain " * (self.preprocessing.length + 8)]
