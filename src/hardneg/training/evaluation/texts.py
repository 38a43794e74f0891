"""Text encoders by name, for evaluations that compare vectors by cosine.

st:PATH            a sentence-transformers model, with its prompts for queries and documents
hf:PATH            a Transformers model, averaged over its tokens
file.py:function   a function of a list of texts; also module:function
FILE               a table (Parquet, JSONL) with the columns text and embedding

``text_encoder`` resolves a name; ``TextEncoder`` is what sts.py, retrieval.py and classification.py use. (Encoders that
are trained are in training/text_encoders.py.)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, NotFinite, optional
from hardneg.io.functions import load_function, loading_model
from hardneg.io.tables import column_of_vectors, read_table, suffix_of

Vectors = Annotated[Tensor, "n d"]
EncodeSentences = Callable[[list[str]], Any]
TABLES = (".parquet", ".jsonl", ".json")


@dataclass(frozen=True)
class TextEncoder:
    """How texts are encoded; queries and documents separately where the model distinguishes them.

    Attributes:
        encode: Function of a list of texts that returns vectors [n, d].
        encode_query: The same for queries.
        encode_document: The same for documents.
    """

    encode: EncodeSentences
    encode_query: EncodeSentences
    encode_document: EncodeSentences

    def texts(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors [n, d] of texts."""
        return encoded(self.encode, texts)

    def queries(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors [n, d] of queries."""
        return encoded(self.encode_query, texts)

    def documents(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors [n, d] of documents."""
        return encoded(self.encode_document, texts)


def text_encoder(name: str, *, device: str | None = None) -> TextEncoder:
    """Return the encoder of a name, one of the forms in the module's docstring.

    Args:
        name: Name of the encoder.
        device: Device of a model; None chooses a GPU where there is one.

    Raises:
        ArgumentError: If the name has none of the forms.
    """
    kind, _, path = name.partition(":")
    if kind in ("st", "hf") and path:
        return model_encoder(sentence_transformer(kind, path, device))
    if suffix_of(Path(name)) in TABLES:
        return as_text_encoder(_of_table(name))
    if path:
        return as_text_encoder(load_function(name, "evaluate"))
    raise ArgumentError("evaluate", "an encoder of texts: st:PATH, hf:PATH, file.py:function or a table", repr(name))


def as_text_encoder(encode: EncodeSentences | TextEncoder) -> TextEncoder:
    """Wrap a function of a list of texts; an encoder is returned unchanged."""
    return encode if isinstance(encode, TextEncoder) else TextEncoder(encode, encode, encode)


def model_encoder(model: Any) -> TextEncoder:
    """Wrap a sentence-transformers model, with its encodings of queries and documents where it has them."""

    def by(encode: Callable[..., Any]) -> EncodeSentences:
        return lambda texts: encode(texts, batch_size=64, show_progress_bar=False, convert_to_tensor=True)

    query, document = (getattr(model, f"encode_{kind}", model.encode) for kind in ("query", "document"))
    return TextEncoder(by(model.encode), by(query), by(document))


def sentence_transformer(kind: str, path: str, device: str | None = None, pooling: str = "mean") -> Any:
    """Load the model in ``path``; a Transformers model (``hf``) gets a layer that pools its tokens.

    Args:
        kind: "st" or "hf".
        path: Folder or hub name of the model.
        device: Device of the model; None chooses a GPU where there is one.
        pooling: Of "hf": "mean" or "cls".
    """
    library = optional("sentence_transformers", f"{kind}:{path}", extra="text")
    with loading_model(f"{kind}:{path}", path):
        if kind == "st":
            return library.SentenceTransformer(path, device=device)
        modules = st_modules()
        words = modules.Transformer(path)
    width = getattr(words, "get_embedding_dimension", None) or words.get_word_embedding_dimension
    pooled = modules.Pooling(width(), pooling_mode=pooling)
    return library.SentenceTransformer(modules=[words, pooled], device=device)


def st_modules() -> Any:
    """Return the building blocks of sentence-transformers models, which version 5.4 moved."""
    try:
        return importlib.import_module("sentence_transformers.sentence_transformer.modules")
    except ImportError:
        return optional("sentence_transformers.models", "sentence-transformers", extra="text")


def encoded(encode: EncodeSentences, texts: Sequence[str]) -> Vectors:
    """Return the vectors of texts in float32 on the CPU, encoding each distinct text once.

    Args:
        encode: Function of a list of texts that returns a tensor or an array [n, d].
        texts: The texts, possibly repeated.

    Raises:
        ArgumentError: If the function returns another number of vectors.
        NotFinite: If a vector contains NaN or infinity.

    Example:
        >>> encoded(lambda texts: [[float(len(text))] for text in texts], ["a", "bb", "a"]).tolist()
        [[1.0], [2.0], [1.0]]
    """
    place = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    found = encode(list(place))
    vectors = found.detach().float().cpu() if isinstance(found, Tensor) else torch.from_numpy(np.asarray(found)).float()
    if vectors.ndim != 2 or len(vectors) != len(place):
        got = f"shape {tuple(vectors.shape)}"
        raise ArgumentError("The encoder", f"to return vectors [{len(place)}, d] for {len(place)} texts", got)
    if not torch.isfinite(vectors).all():
        got = f"{int((~torch.isfinite(vectors)).any(1).sum())} with NaN or infinity"
        raise NotFinite("evaluate", "finite embeddings", got)
    return vectors[torch.tensor([place[text] for text in texts])]


def _of_table(path: str) -> EncodeSentences:
    """Return a function that looks up the embeddings of a table by text."""
    table = read_table(path, "evaluate")
    if not {"text", "embedding"} <= table.keys():
        raise ArgumentError("evaluate", f"columns text and embedding in {path}", f"columns {sorted(table)}")
    vectors = column_of_vectors(table["embedding"], path, "evaluate")
    row_of = {text: row for row, text in enumerate(table["text"])}

    def look_up(texts: list[str]) -> Vectors:
        missing = [text for text in texts if text not in row_of]
        if missing:
            got = f"none for {missing[0][:60]!r} ({len(missing)} missing in total)"
            raise ArgumentError("evaluate", f"an embedding of every text in {path}", got)
        return vectors[torch.tensor([row_of[text] for text in texts])]

    return look_up
