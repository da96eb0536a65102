"""Small networks of random weights that read text, and made-up clinical notes."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

WORDS = (
    *("patient", "with", "fever", "cough", "rash", "itch", "pain", "chest", "skin", "leg"),
    *("day", "since", "and", "no", "mild", "severe", "the", "of", "left"),
)
SIGNS = {"lung": ("fever", "cough", "chest"), "skin": ("rash", "itch", "skin")}


def tiny_bert(folder: Path, seed: int = 0, words: tuple[str, ...] = (), **changes: Any) -> Any:
    """A BERT of 32 features with a WordPiece vocabulary, saved with its tokenizer; the model itself."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder.mkdir(parents=True, exist_ok=True)
    letters = [letter for each in "abcdefghijklmnopqrstuvwxyz0123456789" for letter in (each, f"##{each}")]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *words, *letters]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = transformers.BertTokenizer(str(folder / "vocab.txt"))
    tokenizer.model_max_length = 24
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), max_position_embeddings=24, initializer_range=0.5, **sizes | changes
    )
    model = transformers.BertModel(config).eval()
    model.save_pretrained(folder)
    return model


def write_notes(path: Path, rows: int, seed: int = 0, labelled: bool = True) -> list[dict[str, Any]]:
    """A table of a note, a number, a category, the site and the ward, which the note tells best."""
    rng = np.random.default_rng(seed)
    found = []
    for row in range(rows):
        ward = str(rng.choice(["lung", "skin"]))
        words = [*rng.choice(SIGNS[ward], 2), *rng.choice(WORDS, 4)]
        rng.shuffle(words)
        note = " ".join(words)
        age = int(rng.integers(20, 90) + (8 if ward == "lung" else 0))
        sex = str(rng.choice(["f", "m"]))
        found.append({"note": note, "age": age, "sex": sex, "site": f"site{row % 3}", "ward": ward})
    names = list(found[0]) if labelled else list(found[0])[:-1]
    with open(path, "w", newline="") as stream:
        writer = csv.DictWriter(stream, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(found)
    return found
