"""Sentences: two views of a sentence are two passes with different dropout (SimCSE, Gao et al. 2021).

    text:notes.txt                  one sentence per line; an empty line starts a new document
    text:reviews.csv[review,stars]  a column of a table (CSV, TSV, JSONL, Parquet, a saved data set), and its classes

Encoders are evaluated by STS or retrieval benchmarks with ``--evaluate-with``, by classes where there are any, and by
retrieval of the second half of a text from its first half.

``TextItems`` is what this kind shares with pairs of texts (pairs.py). Files are read by text_files.py and
tokenised by tokens.py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor

from hardneg.core.errors import argument_error, located
from hardneg.io.tables import read_table
from hardneg.training.data.items import Evaluation, Items, Shown, Splits, split_name
from hardneg.training.data.text_files import is_table, labels_in, read_lines, split_columns, texts_in, usual_column
from hardneg.training.data.tokens import Ragged, Tokenizer, Tokens, tokenizer_for, view_keys
from hardneg.training.encoders import Encoder, Represent
from hardneg.training.evaluation.benchmarks import benchmark_figures, benchmark_of, read_benchmark
from hardneg.training.options import TrainOptions
from hardneg.training.text_encoders import check_text_encoder, encoded_texts, text_encoder

SHOWN = 160
"""Characters of a text on a page."""


class TextItems(Items):
    """The base class of text data: tokens, encoders, and evaluation with a benchmark.

    Attributes:
        columns: Fewest and most columns in brackets, and how these are written in errors.
        tokens: The tokens of each side, set by ``prepared``.
        tokenizer: The encoder's tokenizer, set by ``prepared``.
    """

    noun: ClassVar[str] = "text"
    has_benchmarks: ClassVar[bool] = True
    has: ClassVar[str] = "texts"
    columns: ClassVar[tuple[int, int, str]]
    tokens: tuple[Ragged, ...] | None
    tokenizer: Tokenizer | None

    @abstractmethod
    def sides(self) -> list[list[str]]:
        """Return the texts, in one list or in several that are encoded separately."""

    @classmethod
    def check(cls, options: TrainOptions) -> None:
        """Raise for columns, encoders and benchmarks that cannot be used; reads the benchmark but no training data."""
        if options.augment != "auto":
            what = "--augment auto, since the views of texts are passes with different dropout, or given pairs"
            raise argument_error("train", what, "augment", options.augment)
        if options.head == "mlp" and not hasattr(options, "token_pooling"):
            what = "--head auto or linear, since its banks and queues hold vectors of --dim numbers"
            raise argument_error("train", what, "head", options.head)
        with located("--data"):
            split_columns(split_name(options.data)[1].partition(":")[2], *cls.columns)
        with located("--encoder"):
            check_text_encoder(options.encoder)
        with located("--evaluate-with"):
            if (benchmark := benchmark_of(options.evaluate_with)) is not None:
                read_benchmark(benchmark, options.evaluate_on)  # so that its errors appear before training

    @classmethod
    def rebuilt(cls, record: dict[str, Any], options: TrainOptions) -> Encoder:
        """Build the text encoder of a run; nothing of the record is needed.

        Args:
            record: Record of the training texts.
            options: The options of the run.
        """
        head = "linear" if options.head == "auto" else options.head
        pooling = getattr(options, "token_pooling", "mean")
        return text_encoder(options.encoder, options.dim, head=head, seed=options.seed, pooling=pooling)

    def prepared(self, options: TrainOptions, views: Any = None) -> Self:
        """Return the texts with tokens for the encoder of the options."""
        super().prepared(options, views)
        tokenizer = tokenizer_for(options.encoder)
        tokens = tuple(Ragged.of(side, tokenizer) for side in self.sides())
        return replace(self, tokens=tokens, tokenizer=tokenizer)  # type: ignore[type-var]

    def to(self, device: torch.device | str) -> Self:
        """Move all tensors, including tokens, to a device."""
        tokens = self.tokens and tuple(side.to(device) for side in self.tokens)
        return replace(super().to(device), tokens=tokens)  # type: ignore[type-var]

    def views(self, index: Annotated[Tensor, "b"], epoch: int, seed: int) -> tuple[Tokens, Tokens]:
        """Return two views of the texts at some positions, each with its own keys for dropout.

        Args:
            index: Positions [b].
            epoch: The epoch.
            seed: The seed.
        """
        first, second = (self.batch(view, index, view_keys(self.ids[index], view, epoch, seed)) for view in (0, 1))
        return first, second

    def plain(self, index: Annotated[Tensor, "b"]) -> Tokens:
        """Return the tokens of the first side at positions [b], without keys and so without dropout."""
        return self.batch(0, index)

    def batch(self, side: int, index: Annotated[Tensor, "b"], keys: Tensor | None = None) -> Tokens:
        """Return the tokens of one side at positions [b].

        Args:
            side: Index of the side; the only side if there is one.
            index: Positions [b].
            keys: Keys for dropout [b], or None.
        """
        assert self.tokens is not None, "tokens are those of prepared(options)"
        return self.tokens[min(side, len(self.tokens) - 1)].batch(index, keys)

    def measures(self, splits: Splits, options: TrainOptions) -> list[str]:
        """Return the measures, with the benchmark's first.

        Args:
            splits: The splits of the run.
            options: The options of the run.
        """
        benchmark = benchmark_of(options.evaluate_with)
        return [*([] if benchmark is None else [benchmark.name]), *super().measures(splits, options)]

    def evaluate(self, splits: Splits, represent: Represent, options: TrainOptions) -> Evaluation:
        """Evaluate like all kinds, and with the benchmark of ``--evaluate-with``.

        Args:
            splits: The splits of the run.
            represent: The features of the trained encoder.
            options: The options of the run.
        """
        found = super().evaluate(splits, represent, options)
        benchmark = benchmark_of(options.evaluate_with)
        if benchmark is None:
            return found
        encode = partial(encoded_texts, represent.encoder, options.encoder)
        figures = benchmark_figures(benchmark, encode, options.evaluate_on)
        for name in ("correct", "scores", "num_items"):
            figures[name] = found.figures.get(name, {}) | figures.get(name, {})
        return Evaluation(found.figures | figures, found.arrays)

    def tokens_of(self, texts: Sequence[str]) -> Tokens:
        """Tokenise any texts for the encoder."""
        assert self.tokenizer is not None, "tokens are those of prepared(options)"
        ragged = Ragged.of(texts, self.tokenizer).to(self.ids.device)
        return ragged.batch(torch.arange(len(texts), device=self.ids.device))


@dataclass(frozen=True, eq=False)
class Texts(TextItems, prefix="text", form="text:FILE"):
    """Sentences with their positions in documents and, where known, classes.

    Attributes:
        texts: The sentences.
        labels: Class of each sentence, int64 [n], or None.
        ids: Id of each sentence, int64 [n].
        places: Position of each sentence, int64 [n]; neighbours in a document differ by 1.
        name: Name of the data.
        classes: Names of the classes.
        tokens: The tokens, set by ``prepared``.
        tokenizer: The encoder's tokenizer, set by ``prepared``.
    """

    texts: list[str]
    labels: Annotated[Tensor, "n"] | None
    ids: Annotated[Tensor, "n"]
    places: Annotated[Tensor, "n"]
    name: str
    classes: tuple[str, ...] = ()
    tokens: tuple[Ragged, ...] | None = field(default=None, repr=False)
    tokenizer: Tokenizer | None = field(default=None, repr=False)
    how_to_label: ClassVar[str] = "name a column of classes: text:TABLE[column,label]"
    columns: ClassVar[tuple[int, int, str]] = (1, 2, "text:FILE or text:TABLE[column,label]")

    @classmethod
    def read(cls, path: str, options: TrainOptions) -> Texts:
        """Read a text file or a table.

        Args:
            path: Path with optional columns in brackets: text and label.
            options: The options of the run.
        """
        file, columns = split_columns(path, *cls.columns)
        if not is_table(file):
            lines = read_lines(file)
            places = torch.tensor(lines.places)
            return cls(lines.texts, None, torch.arange(len(places)), places, path)
        table = read_table(file, "data")
        text, label = [*(columns or usual_column(table, file)), None][:2]
        if label is None and not columns and "label" in table:
            label = "label"
        texts = texts_in(table, str(text), file)
        labels, classes = (None, ()) if label is None else labels_in(table, label, file)
        return cls(texts, labels, torch.arange(len(texts)), torch.arange(len(texts)), path, classes)

    def sides(self) -> list[list[str]]:
        """Return the sentences as the only side."""
        return [self.texts]

    def views_evaluated(self, index: Annotated[Tensor, "b"], epoch: int, seed: int) -> tuple[Tokens, Tokens]:
        """Return the two halves of each text; two passes with different dropout would be matched almost always.

        Args:
            index: Positions [b].
            epoch: Unused.
            seed: Unused.
        """
        first, second = zip(*(halves(self.texts[i]) for i in index.tolist()), strict=True)
        return self.tokens_of(first), self.tokens_of(second)

    def shown(self, position: int) -> Shown:
        """Return the shortened sentence at a position."""
        return Shown(text=shortened(self.texts[position]))


def halves(text: str) -> tuple[str, str]:
    """Split a text into halves by words, or by characters if there is one word only, as in Chinese.

    Both halves of a single character are that character.

    >>> halves("one two three"), halves("abc")
    (('one', 'two three'), ('a', 'bc'))
    """
    words = text.split()
    parts, between = (words, " ") if len(words) > 1 else (list(text.strip()), "")
    cut = max(1, len(parts) // 2)
    return between.join(parts[:cut]), between.join(parts[cut:] or parts)


def shortened(text: str) -> str:
    """Cut a text to ``SHOWN`` characters for a page."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN].rstrip()} ..."
