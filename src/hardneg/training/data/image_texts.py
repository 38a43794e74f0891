"""Images and their texts (CLIP, Radford et al. 2021): an encoder for each side, and one space for both.

    imagetext:pairs.jsonl[image,caption]   columns of a table: paths of images, from where the table is, and texts
    imagetext:pairs.jsonl[image,caption]@64   the same, all images being made 64 x 64
    imagetext:FOLDER                       photo.jpg beside photo.txt, with a text on each line; or images beside
                                           metadata.jsonl or metadata.csv, as Hugging Face's imagefolder has them

The view of an image is a crop, unless ``--augment`` names others: colours and sides may be what its text speaks of.
Pairs that share an image or a text, or are joined by a chain of such, are one document: never negatives of each other,
held out together, and right answers for each other in the evaluation, which is retrieval both ways on held-out pairs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, NoFile, located
from hardneg.io.embeddings import pack_bits, pack_numbers
from hardneg.io.tables import Table, read_table
from hardneg.training.augmentation.views import check_augment
from hardneg.training.data.image_files import decoded_images, image_files, same_shape
from hardneg.training.data.images import ImageData, channels_first
from hardneg.training.data.inputs import Sided, TwoTowers
from hardneg.training.data.items import Evaluation, Items, Repeated, Shown, Splits, stratified
from hardneg.training.data.text_files import read_lines, split_columns, texts_in
from hardneg.training.data.text_pairs import grouped
from hardneg.training.data.texts import Texts, shortened
from hardneg.training.encoders import Represent, check_encoder
from hardneg.training.evaluation.measures import register_measure
from hardneg.training.evaluation.pairs import alignment, directions
from hardneg.training.normalisation import Scale
from hardneg.training.options import TrainOptions
from hardneg.training.text_encoders import check_text_encoder, encoded_texts, text_encoder

FORM = "imagetext:TABLE[image,caption] or imagetext:FOLDER"
IMAGE_COLUMNS = ("image", "image_path", "file_name", "filename", "filepath", "path", "file")
TEXT_COLUMNS = ("caption", "text", "title", "sentence")
METADATA = ("metadata.jsonl", "metadata.csv")
CROPS = "cifar(crop_scale=(0.5, 1.0), flip_probability=0.0, jitter_probability=0.0, grey_probability=0.0)"
"""What --augment auto is."""
RANKS = (1, 5, 10)

register_measure("both_ways", "retrieval both ways", "the mean of image to text and text to image")
register_measure("image_to_text", "image to text", "how often the text nearest to a {split} image is one of its own")
register_measure("text_to_image", "text to image", "how often the image nearest to a {split} text is its own")


class ImageTextEncoder(TwoTowers):
    """Images first, texts second; what is evaluated are the vectors that the loss compares."""

    def features(self, inputs: Any) -> Annotated[Tensor, "b d"]:
        return self(inputs)  # type: ignore[no-any-return]

    def encode(self, texts: Sequence[str]) -> Annotated[Tensor, "n d"]:
        """The vectors of any texts, to be compared with those of images."""
        return encoded_texts(self, str(self.second.name), texts, lambda tokens: Sided(second=tokens))


@dataclass(frozen=True, eq=False)
class ImageTexts(Items, prefix="imagetext", form="imagetext:TABLE"):
    """Pairs of a text and an image, with the number of the document of each; an image is held once."""

    pictures: ImageData
    picture_of: Annotated[Tensor, "n"]  # each pair: a row of the pictures
    captions: Texts
    documents: Annotated[Tensor, "n"]
    labels: Annotated[Tensor, "n"] | None
    ids: Annotated[Tensor, "n"]
    name: str
    classes: tuple[str, ...] = ()
    noun: ClassVar[str] = "pair"
    has: ClassVar[str] = "texts"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not len(self.picture_of) == len(self.captions) == len(self.ids):
            got = f"{len(self.picture_of)} images and {len(self.captions)} texts"
            raise ArgumentError(f"ImageTexts {self.name!r}", f"an image and a text of each of {len(self)} pairs", got)

    @classmethod
    def check(cls, options: TrainOptions) -> None:
        with located("--data"):
            _place(options.data.partition("imagetext:")[2])
        with located("--augment"):
            check_augment(options.augment)
        with located("--encoder"):
            if options.encoder != "auto":
                check_encoder(options.encoder)
        with located("--text-encoder"):
            check_text_encoder(_for_texts(options).encoder)

    @classmethod
    def read(cls, path: str, options: TrainOptions) -> ImageTexts:
        place, columns, size = _place(path)
        files, texts = _of_folder(place, columns) if place.is_dir() else _of_table(place, columns)
        return cls.of(files, texts, path, place if place.is_dir() else place.parent, size)

    @classmethod
    def of(cls, files: list[Path], texts: list[str], name: str, folder: Path, size: int | None = None) -> ImageTexts:
        """Pairs of image files and texts; a file that is named several times is read once."""
        place_of = {file: place for place, file in enumerate(dict.fromkeys(files))}
        found = decoded_images(list(place_of), folder, size)
        arrays = channels_first(name, same_shape([found[file] for file in place_of], [str(file) for file in place_of]))
        images, ids = torch.from_numpy(np.ascontiguousarray(arrays)), torch.arange(len(files))
        numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        group = grouped([str(file) for file in files], [numbers[text] for text in texts], len(numbers))
        documents = torch.tensor([group[numbers[text]] for text in texts])
        captions = Texts(texts, None, ids, ids, name)
        pictures = ImageData(images, None, torch.arange(len(images)), name)
        return cls(pictures, torch.tensor([place_of[file] for file in files]), captions, documents, None, ids, name)

    def prepared(self, options: TrainOptions, views: Any = None) -> ImageTexts:
        """``views(images, ids, epoch, seed)`` gives two views of images, of which the first is taken."""
        pictures = self.pictures.prepared(_for_images(options), views)
        return replace(self, pictures=pictures, captions=self.captions.prepared(_for_texts(options)))

    def described(self) -> str:
        return self.pictures.described()

    def scale(self) -> Scale:
        return self.pictures.scale()

    def check_views(self, options: TrainOptions) -> None:
        self.pictures.check_views(options)

    def views(self, index: Annotated[Tensor, "b"], epoch: int, seed: int) -> tuple[Sided, Sided]:
        images = self.pictures.images[self.picture_of[index]]
        crops, _ = self.pictures.views_of(images, self.ids[index], epoch, seed)  # another crop for each of its texts
        return Sided(first=crops), Sided(second=self.captions.views(index, epoch, seed)[0])

    def views_evaluated(self, index: Annotated[Tensor, "b"], epoch: int, seed: int) -> tuple[Sided, Sided]:
        return self.plain(index), Sided(second=self.captions.plain(index))

    def plain(self, index: Annotated[Tensor, "b"]) -> Sided:
        return Sided(first=self.pictures.plain(self.picture_of[index]))

    @classmethod
    def rebuilt(cls, record: dict[str, Any], options: TrainOptions) -> ImageTextEncoder:
        of_texts = _for_texts(options).encoder
        texts = text_encoder(of_texts, options.dim, head="linear", seed=options.seed)
        return ImageTextEncoder(ImageData.rebuilt(record, options), texts)

    def record(self) -> dict[str, Any]:
        return {**super().record(), "shape": list(self.pictures.images.shape[1:])}

    def check_like(self, record: dict[str, Any]) -> None:
        self.pictures.check_like(record)

    def shown(self, position: int) -> Shown:
        picture = self.pictures.shown(int(self.picture_of[position]))
        return replace(picture, text=shortened(self.captions.texts[position]))

    def measures(self, splits: Splits, options: TrainOptions) -> list[str]:
        return ["both_ways", "image_to_text", "text_to_image"]

    def evaluate(self, splits: Splits, represent: Represent, options: TrainOptions) -> Evaluation:
        """The share of rows whose nearest of the other side is of their document, and recall at 5 and 10."""
        images, texts = represent.views(splits.test, most=len(splits.test))
        places = torch.unique(splits.test.documents, return_inverse=True)[1]
        ways = {"image_to_text": ranks(images, texts, places), "text_to_image": ranks(texts, images, places)}
        right = {name: (rank == 0).cpu() for name, rank in ways.items()}
        both = torch.stack([*right.values()]).double().mean(0)
        figures: dict[str, Any] = {"both_ways": float(both.mean()), "headline": "both_ways"}
        figures |= {name: float(one.double().mean()) for name, one in right.items()}
        figures["recall"] = {
            name: {f"@{k}": float((rank < k).double().mean()) for k in RANKS} for name, rank in ways.items()
        }
        figures["correct"] = {name: pack_bits(one.numpy()) for name, one in right.items()}
        figures |= {"scores": {"both_ways": pack_numbers(both.numpy())}, "num_test": len(splits.test)}
        return Evaluation(figures | {"alignment": alignment(images, texts)}, {"test_x": images})

    def held(self, share: float, seed: int) -> Annotated[Tensor, "n"]:
        """By documents, so that no held-out image or text is trained on."""
        names, places = torch.unique(self.documents.cpu(), return_inverse=True)
        return stratified(None, len(names), share, seed, "more images with texts of their own")[places]

    def take(self, index: Annotated[Tensor, "m"]) -> Self:
        needed, picture_of = torch.unique(self.picture_of[index], return_inverse=True)
        pictures, captions = self.pictures.take(needed), self.captions.take(index)
        documents, ids = self.documents[index], self.ids[index]
        return replace(self, pictures=pictures, picture_of=picture_of, captions=captions, documents=documents, ids=ids)

    def content(self) -> Iterator[tuple[str, Tensor | Repeated | list[Any] | None]]:
        """With the image of each pair, so that it does not count how often an image is held."""
        yield "images", Repeated(self.pictures.images, self.picture_of)
        yield "texts", self.captions.texts
        yield from (part for part in super().content() if part[0] != "picture_of")


def ranks(
    queries: Annotated[Tensor, "n d"], others: Annotated[Tensor, "n d"], documents: Annotated[Tensor, "n"]
) -> Annotated[Tensor, "n"]:
    """How many documents are at least as near to a query as its own, each by the nearest of its rows.

    >>> x = torch.eye(3)
    >>> ranks(x, x[[1, 0, 2]], torch.tensor([0, 1, 2])).tolist()
    [2, 2, 0]
    """
    cosines = directions(queries) @ directions(others).T
    where = documents.expand(len(queries), -1)
    nearest = cosines.new_full((len(queries), int(documents.max()) + 1), -torch.inf)
    nearest = nearest.scatter_reduce(1, where, cosines, "amax")  # [n, documents]
    return (nearest >= nearest.gather(1, documents[:, None])).sum(1) - 1


def _for_texts(options: TrainOptions) -> TrainOptions:
    return replace(options, encoder=getattr(options, "text_encoder", "auto"), augment="auto")


def _for_images(options: TrainOptions) -> TrainOptions:
    return replace(options, augment=CROPS) if options.augment == "auto" else options


def _place(path: str) -> tuple[Path, list[str], int | None]:
    """The file or folder, the columns in brackets, and the size of the images behind @."""
    square = re.fullmatch(r"(.+)@(\d+)", path)
    path, size = (square[1], int(square[2])) if square else (path, None)
    if size is not None and size < 4:
        raise ArgumentError("data", "a size of at least 4 pixels", f"@{size}")
    return *split_columns(path, 2, 2, FORM), size


def _of_table(path: Path, columns: list[str]) -> tuple[list[Path], list[str]]:
    table = read_table(path, "data")
    image, text = columns or (_usual(table, IMAGE_COLUMNS, path), _usual(table, TEXT_COLUMNS, path))
    files = [path.parent / name for name in texts_in(table, image, path)]
    return files, texts_in(table, text, path)


def _usual(table: Table, names: Sequence[str], path: Path) -> str:
    found = next((name for name in names if name in table), None)
    if found is None:
        what = f"a column among {', '.join(names)} in {path}"
        raise ArgumentError("data", what, f"columns {sorted(table)}", "name both: imagetext:TABLE[image,caption]")
    return found


def _of_folder(folder: Path, columns: list[str]) -> tuple[list[Path], list[str]]:
    metadata = next((folder / name for name in METADATA if (folder / name).is_file()), None)
    if metadata is not None:
        return _of_table(metadata, columns)
    if columns:
        what = f"a table with the columns {', '.join(columns)}"
        raise NoFile("data", what, folder / METADATA[0], "where there is none")
    pairs = [(file, file.with_suffix(".txt")) for file in image_files(folder)]
    if not pairs or not any(text.is_file() for _, text in pairs):
        what = "images with texts beside them: photo.jpg and photo.txt, or metadata.jsonl"
        raise NoFile("data", what, folder, "where there are none")
    rows = [(file, line) for file, text in pairs for line in read_lines(text).texts]
    return [file for file, _ in rows], [line for _, line in rows]
