"""`hf:NAME_OR_FOLDER` and `st:NAME_OR_FOLDER`: a model of transformers, or of sentence-transformers.

It comes from a folder, the hub or its cache. Features of images are the model's pooled output where its
weights have one, otherwise the mean of the last hidden state over tokens or pixels. Those of text are the
mean over its tokens, or what the model itself makes of them (`st:`). Preprocessing is read from the image
processor or the tokenizer that comes with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.container import canonical_json
from fedsolve.data.address import Address
from fedsolve.data.backbones.preprocessing import (
    FILTERS,
    OPTIONS,
    PIECE,
    Preprocessing,
    digest_of,
    prepare,
)
from fedsolve.data.backbones.torch_callable import TorchBackbone
from fedsolve.errors import DataError, ModelFileError, explained, require

READS = ("images", "text")
OUTPUTS = ("pooled", "mean", "cls")
# What a configuration says of files and versions is no part of the function it describes.
_INCIDENTAL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")

LENGTH = 512
"""Tokens that are read of a text where neither network nor tokenizer says how many."""

TOKENS = "a number of tokens, such as 256"

_PROBES = (
    "Heart-rate 72/min, NOT raised.",
    "Übelkeit seit gestern;  Fieber 38,5 °C",
    "心拍数は正常。 naïve\n42%",
)


def load(address: Address, cache: Path | None) -> TorchBackbone:
    """`hf:microsoft/resnet-18`, `hf:bert-base-uncased` or `hf:./folder`.

    Options: output=pooled (the model's own), mean (of the last hidden state) or cls (its first token);
    device; reads=text for a model of both; length, the tokens read of a text; and those of the preprocessing
    of images, which replace what the image processor says. `st:` takes length and device.
    """
    where = address.text
    if address.scheme == "st":
        return _sentences(address)
    require("torch", "hf", where)
    transformers = require("transformers", "hf", where)
    place = place_of(address)
    with quiet(transformers):
        model, pooler_missing = _model(transformers, place, where)
        both = hasattr(model, "get_image_features")
        usual = "text" if model.main_input_name == "input_ids" and not both else "images"
        if (address.word("reads", READS) or usual) == "text":
            address.allow("reads", "output", "device", "length")
            tokens, preprocessing = _tokenizer(transformers, place, model, where), None
        else:
            address.allow("reads", "output", "device", *OPTIONS)
            tokens, preprocessing = None, _preprocessing(transformers, place, address)
    output = address.word("output", OUTPUTS)
    if output == "pooled" and pooler_missing:
        raise DataError(f"{where}: the weights have no pooled output. Use output=mean.")
    identity = {"name": f"hf:{model.config.model_type}", "config": config_digest(model.config)}
    name = f"hf:{address.rest}"
    about: dict[str, Any] = {"device": address.options.get("device", "cpu"), "licence": card_licence(place)}
    if preprocessing is None:
        identity |= {"reads": "text", "output": output or "mean"}
        most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or LENGTH
        length = address.whole("length", TOKENS) or int(min(tokens.model_max_length, most))
        network = model.get_encoder() if model.config.is_encoder_decoder else model
        network = getattr(model, "text_model", network)  # of a model of text and images

        def embed(texts: list[str]) -> Any:
            batch = tokens(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
            result = network(**batch.to(model.device))
            return _reduced(result, identity["output"], where, batch["attention_mask"])

        return TextBackbone(name, model, tokens, length, identity, embed, **about)
    identity["output"] = output or ("mean" if pooler_missing else _offered(model, preprocessing, where))

    def features(images: Any) -> Any:
        return _reduced(_ask(model, images), identity["output"], where)

    return TorchBackbone(name, model, preprocessing, identity, call=features, **about)


def _sentences(address: Address) -> TextBackbone:
    """`st:all-MiniLM-L6-v2` or `st:./folder`."""
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


def place_of(address: Address) -> str:
    """The folder or the name on the hub that an address names."""
    folder = Path(address.rest).expanduser()
    if not address.rest:
        raise DataError(f"{address.text}: name a model or a folder, such as {address.scheme}:./my-model.")
    if address.rest.startswith((".", "/", "~")) and not folder.is_dir():
        raise ModelFileError(f"{address.text}: there is no folder {folder}.")
    return str(folder) if folder.is_dir() else address.rest


def card_licence(place: str) -> str | None:
    """The licence that the card of a model (README.md) names; None where there is no card at hand."""
    card = Path(place) / "README.md" if Path(place).is_dir() else place
    try:
        hub = require("huggingface_hub", "hf", place)
        return hub.ModelCard.load(card, ignore_metadata_errors=True).data.license or None
    except Exception:  # a folder without one, no network, a card that cannot be read
        return None


def config_digest(config: Any, *more: Any) -> str:
    """Digest of what a configuration says of the function, and of `more`."""
    says = {key: value for key, value in config.to_diff_dict().items() if key not in _INCIDENTAL}
    return digest_of([canonical_json(part).encode() for part in (says, *more)])


def _tokenizer(transformers: Any, place: str, model: Any, address: str) -> Any:
    remedy = "Save the tokenizer into the same folder."
    with explained(f"{address}: no tokenizer can be loaded", remedy, ModelFileError):
        tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    # Where there is none, transformers makes one up that knows no words.
    known, words = len(tokenizer.get_vocab()), model.config.get_text_config().vocab_size
    if 2 * known < words:
        raise ModelFileError(
            f"{address}: the tokenizer knows {known} words and the network {words}. {remedy}"
        )
    tokenizer.padding_side = "right"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def _model(transformers: Any, place: str, address: str) -> tuple[Any, bool]:
    """The model, and whether the layer behind its pooled output is missing from the weights."""
    remedy = "Give a folder with config.json and model.safetensors, or the name of a model on the hub."
    with explained(f"{address}: the model cannot be loaded", remedy, ModelFileError):
        config = transformers.AutoConfig.from_pretrained(place)
        if config.model_type == "vit_mae":
            config.mask_ratio = 0.0  # masking is for pre-training; features come from the whole image
        model, report = transformers.AutoModel.from_pretrained(place, config=config, output_loading_info=True)
    missing = sorted(report["missing_keys"])
    others = [name for name in missing if "pooler" not in name.split(".")]
    if others:
        raise ModelFileError(
            f"{address}: the file of weights lacks {len(others)} tensors, {others[0]} among them; they would "
            "be random. Save the whole model again."
        )
    state = model.state_dict()
    for name in missing:
        # Drawn anew at every load; they are not used, and must not change the digest of the weights.
        state[name].zero_()
    return model, bool(missing)


def _reduced(result: Any, output: str, address: str, mask: Any = None) -> Any:
    """One row of features for each input; `mask` says which tokens of a text are no filling."""
    if output == "pooled":
        pooled = getattr(result, "pooler_output", None)
        if pooled is None:
            raise DataError(f"{address}: the model has no pooled output. Use output=mean.")
        return pooled.flatten(1)
    hidden = result.last_hidden_state
    if output == "cls":
        if hidden.ndim != 3:
            raise DataError(f"{address}: the model has no tokens, so no first one. Use output=mean.")
        return hidden[:, 0]
    if mask is not None:
        there = mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * there).sum(1) / there.sum(1).clamp(min=1)
    return hidden.flatten(2).mean(2) if hidden.ndim == 4 else hidden.mean(1)


def _ask(model: Any, images: Any) -> Any:
    if model.config.model_type == "vit_mae":
        # The model sorts its tokens by noise; rising noise keeps them in place.
        tokens = model.embeddings.patch_embeddings.num_patches
        noise = images.new_ones(len(images), tokens).cumsum(1)
        return model(pixel_values=images, noise=noise)
    # Models of text and images, such as CLIP, answer for images alone here.
    answer = getattr(model, "get_image_features", model)
    return answer(pixel_values=images)


def _offered(model: Any, preprocessing: Preprocessing, address: str) -> str:
    """Which output the model offers: "pooled", or "mean" of its last hidden state."""
    torch = require("torch", "hf", address)
    height, width = preprocessing.size or (224, 224)
    black = torch.from_numpy(prepare([np.zeros((height, width, 3), dtype=np.uint8)], preprocessing))
    shape = f"{tuple(black.shape[1:])} (channels, height, width)"
    with torch.inference_mode(), explained(f"{address}: the model cannot process images of shape {shape}"):
        result = _ask(model.float().eval(), black)
    if getattr(result, "pooler_output", None) is not None:
        return "pooled"
    if getattr(result, "last_hidden_state", None) is None:
        raise DataError(
            f"{address}: {type(model).__name__} gives neither a pooled output nor a last hidden state. "
            "Wrap it in a function of your own and use torch:MODULE:CALLABLE."
        )
    return "mean"


def _preprocessing(transformers: Any, place: str, address: Address) -> Preprocessing:
    """What the model's image processor does, with the changes of the options."""
    if "size" in address.options and {"normalise", "mean"} & set(address.options):
        return Preprocessing().adjusted(address)
    remedy = "If there is none, describe the preprocessing: ?size=224&normalise=imagenet"
    with explained(f"{address.text}: no image processor can be loaded", remedy, ModelFileError):
        processor = transformers.AutoImageProcessor.from_pretrained(place)
    settings = _translated(processor.to_dict())
    if settings is None or not _agree(processor, settings):
        raise DataError(
            f"{address.text}: {type(processor).__name__} prepares images in a way that fedsolve does not "
            "know. Describe the preprocessing yourself: ?size=224&normalise=imagenet"
        )
    return settings.adjusted(address)


def _translated(says: dict[str, Any]) -> Preprocessing | None:
    """An image processor's settings as ours; None where they have no counterpart."""
    size, crop = dict(says.get("size") or {}), dict(says.get("crop_size") or {})
    shorter = size.get("shortest_edge")
    final: tuple[int, int] | None = None
    if shorter is None:
        final = (size["height"], size["width"]) if {"height", "width"} <= set(size) else None
    elif says.get("crop_pct") is not None:
        # ConvNeXt's rule: below 384 pixels a share is cut out, from there on the image is squeezed.
        final = (shorter, shorter)
        shorter = int(shorter / says["crop_pct"]) if shorter < 384 else None
    elif says.get("do_center_crop") and {"height", "width"} <= set(crop):
        final = (crop["height"], crop["width"])
    filters = {int(value): name for name, value in FILTERS.items()}
    resample = says.get("resample")
    if final is None or not says.get("do_resize") or resample not in filters:
        return None
    try:
        return Preprocessing(
            size=final,
            shorter_side=shorter,
            interpolation=filters[resample],
            scale=1.0 / says.get("rescale_factor", 1 / 255) if says.get("do_rescale") else 1.0,
            mean=tuple(says["image_mean"]) if says.get("do_normalize") else (0.0,),
            std=tuple(says["image_std"]) if says.get("do_normalize") else (1.0,),
            channels="bgr" if says.get("do_flip_channel_order") else "rgb",
        )
    except (DataError, KeyError, TypeError):
        return None


def _agree(processor: Any, preprocessing: Preprocessing) -> bool:
    """Whether both prepare an image alike, up to rounding of resized pixels."""
    image = np.random.default_rng(0).integers(0, 256, (64, 80, 3), dtype=np.uint8)
    theirs = np.asarray(processor(image, return_tensors="np")["pixel_values"][0])
    ours = prepare([image], preprocessing)[0]
    levels = 3.0 / preprocessing.scale / min(preprocessing.std)
    return theirs.shape == ours.shape and bool(np.abs(theirs - ours).max() <= levels)


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Silence transformers' own messages and progress bars."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


# -- text -------------------------------------------------------------------------------------------


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
        **about: Any,
    ) -> None:
        self._tokenizer = tokenizer
        vocabulary = canonical_json(tokenizer.get_vocab()).encode()
        told = canonical_json([list(map(int, ids)) for ids in self._ids(_PROBES)]).encode()
        tokens = Tokens(digest_of([vocabulary, told]), length, prompt)
        super().__init__(name, module, tokens, identity, call=embed, **about)

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
