"""`st:NAME_OR_FOLDER`: a model of sentence-transformers, with its own pooling and normalisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedsolve.data.address import Address
from fedsolve.data.backbones.preprocessing import PIECE
from fedsolve.data.backbones.text import LENGTH, TOKENS, TextBackbone
from fedsolve.data.backbones.transformers import card_licence, config_digest, place_of, quiet
from fedsolve.errors import ModelFileError, explained, require


def load(address: Address, cache: Path | None) -> TextBackbone:
    """`st:all-MiniLM-L6-v2` or `st:./folder`; options: length (tokens that are read) and device."""
    package = require("sentence_transformers", "text", address.text)
    address.allow("length", "device")
    place, length = place_of(address), address.whole("length", TOKENS)
    remedy = "Give a folder that SentenceTransformer.save wrote, or the name of one on the hub."
    with (
        quiet(require("transformers", "text", address.text)),
        explained(f"{address.text}: the model cannot be loaded", remedy, ModelFileError),
    ):
        model = package.SentenceTransformer(place, device="cpu", trust_remote_code=False)
    if length is not None:
        model.max_seq_length = length
    prompt = str(model.prompts.get(model.default_prompt_name) or "")
    parts = [[type(part).__name__, part.get_config_dict()] for part in list(model)[1:]]
    inner = getattr(model[0], "auto_model", None)
    lower = getattr(model[0], "do_lower_case", False)
    about = config_digest(inner.config, parts, lower) if inner is not None else type(model[0]).__name__

    def embed(texts: list[str]) -> Any:
        return model.encode(texts, batch_size=PIECE, show_progress_bar=False, convert_to_tensor=True)

    return TextBackbone(
        f"st:{address.rest}",
        model,
        model.tokenizer,
        model.max_seq_length or LENGTH,
        {"name": "st", "config": about},
        embed,
        prompt=prompt,
        device=address.options.get("device", "cpu"),
        licence=card_licence(place),
    )
