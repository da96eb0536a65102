"""`st:NAME_OR_FOLDER`: a model of sentence-transformers, with its own pooling and normalisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedsolve.data.backbones.backbone_address import AddressOptions
from fedsolve.data.backbones.preprocessing import PIECE
from fedsolve.data.backbones.text import LENGTH, TextBackbone
from fedsolve.data.backbones.transformers import card_licence, config_digest, place_of, quiet
from fedsolve.errors import ModelFileError, explained, require


def load(target: str, options: AddressOptions, cache: Path | None) -> TextBackbone:
    """`st:all-MiniLM-L6-v2` or `st:./folder`; options: length (tokens that are read) and device."""
    package = require("sentence_transformers", "text", options.address)
    place = place_of(target, options.address)
    length, device = options.tokens("length"), options.text("device") or "cpu"
    options.finish()
    remedy = "Give a folder that SentenceTransformer.save wrote, or the name of one on the hub."
    with (
        quiet(require("transformers", "text", options.address)),
        explained(f"{options.address}: the model cannot be loaded", remedy, ModelFileError),
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
        f"st:{target}",
        model,
        model.tokenizer,
        model.max_seq_length or LENGTH,
        {"name": "st", "config": about},
        embed,
        prompt=prompt,
        device=device,
        licence=card_licence(place),
    )
