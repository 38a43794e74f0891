"""Images and their texts (CLIP, Radford et al. 2021): one encoder for each side, and a common embedding space.

    imagetext:pairs.jsonl[image,caption]   columns of a table: paths of images relative to the table, and texts
    imagetext:pairs.jsonl[image,caption]@64   the same, with all images resized to 64 x 64
    imagetext:FOLDER                       photo.jpg next to photo.txt, with a text on each line; or images next to
                                           metadata.jsonl or metadata.csv, as in Hugging Face's imagefolder

The view of an image is a crop, unless ``--augment`` names others: its text may refer to colours and sides.
Pairs that share an image or a text, or are connected by a chain of such pairs, are one document: they are never
negatives of each other, are held out together, and count as correct for each other in the evaluation, which is
retrieval both ways on held-out pairs.

``ImageTexts`` combines ``ImageData`` for the pictures and ``Texts`` for the captions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, NoFile, located
from hardneg.io.embeddings import pack_bits, pack_numbers
from hardneg.io.tables import Table, read_table
from hardneg.training.augmentation.views import check_augment
from hardneg.training.data.image_files import image_files
from hardneg.training.data.image_sources import Files, Strings
from hardneg.training.data.images import ImageData
from hardneg.training.data.inputs import Sided, TwoTowers
from hardneg.training.data.items import Evaluation, Items, Repeated, Shown, Splits, stratified
from hardneg.training.data.lazy_images import Opening, opened
from hardneg.training.data.pairs import grouped
from hardneg.training.data.text_files import read_lines, split_columns, texts_in
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
"""The augmentation that ``--augment auto`` stands for."""

RANKS = (1, 5, 10)
"""Cutoffs of recall."""

register_measure("both_ways", "retrieval both ways", "the mean of image-to-text and text-to-image retrieval")
register_measure("image_to_text", "image to text", "how often the text nearest to a {split} image is one of its own")
register_measure("text_to_image", "text to image", "how often the image nearest to a {split} text is its own")


class ImageTextEncoder(TwoTowers):
    """An encoder of images first and texts second; the evaluated features are the vectors that the loss compares."""

    features = TwoTowers.forward

    def encode(self, texts: Sequence[str]) -> Annotated[Tensor, "n d"]:
        """Return the vectors [n, d] of texts, to compare with those of images."""
        return encoded_texts(self, str(self.second.name), texts, lambda tokens: Sided(second=tokens))


@dataclass(frozen=True, eq=False)
class ImageTexts(Items, prefix="imagetext", form="imagetext:TABLE"):
    """Pairs of an image and a text; an image with several texts is stored once.

    Attributes:
        pictures: The distinct images.
        picture_of: Row in ``pictures`` of each pair, int64 [n].
        captions: The texts, one per pair.
        documents: Document of each pair, int64 [n].
        labels: Always None.
        ids: Id of each pair, int64 [n].
        name: Name of the data.
        classes: Always empty.
    """

    pictures: ImageData
    picture_of: Annotated[Tensor, "n"]
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
            raise ArgumentError(f"ImageTexts {self.name!r}", f"an image and a text for each of {len(self)} pairs", got)

    @classmethod
    def check(cls, options: TrainOptions) -> None:
        """Raise for data, augmentations and encoders that cannot be used, without reading data."""
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
        """Read pairs from a table or a folder.

        Args:
            path: Path with optional columns in brackets and size after @.
            options: The options of the run.
        """
        place, columns, size = _place(path)
        files, texts = _of_folder(place, columns) if place.is_dir() else _of_table(place, columns)
        return cls.of(files, texts, path, Opening(size, options.cache_images, options.bad_images))

    @classmethod
    def of(cls, files: list[Path], texts: list[str], name: str, how: Opening = Opening()) -> ImageTexts:
        """Build pairs from image files and texts; a file that occurs several times is read once.

        Args:
            files: Image file of each pair.
            texts: Text of each pair.
            name: Name of the data.
            how: How image files are opened.
        """
        distinct = [*dict.fromkeys(files)]
        (images,) = opened(name, [Files(Path(), Strings(map(str, distinct)))], how)
        place_of = {distinct[position]: place for place, position in enumerate(images.positions.tolist())}
        pairs = [(file, text) for file, text in zip(files, texts, strict=True) if file in place_of]
        files, texts = [file for file, _ in pairs], [text for _, text in pairs]
        pictures, ids = ImageData.of(images, name), torch.arange(len(files))
        numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        group = grouped([str(file) for file in files], [numbers[text] for text in texts], len(numbers))
        documents = torch.tensor([group[numbers[text]] for text in texts])
        captions = Texts(texts, None, ids, ids, name)
        return cls(pictures, torch.tensor([place_of[file] for file in files]), captions, documents, None, ids, name)

    def prepared(self, options: TrainOptions, views: Any = None) -> ImageTexts:
        """Return the pairs with views of the images and tokens of the texts.

        Args:
            options: The options of the run.
            views: A callable (images, ids, epoch, seed) -> (view 1, view 2), of which the first view is used.
        """
        pictures = self.pictures.prepared(_for_images(options), views)
        return replace(self, pictures=pictures, captions=self.captions.prepared(_for_texts(options)))

    def described(self) -> str:
        """Describe the views of the images in one line."""
        return self.pictures.described()

    def scale(self) -> Scale:
        """Return mean and std of the images."""
        return self.pictures.scale()

    def check_views(self, options: TrainOptions) -> None:
        """Raise if evaluation would see images of another scale or size than a user's own views."""
        self.pictures.check_views(options)

    @property
    def fetches(self) -> bool:
        """Whether workers decode the images."""
        return self.pictures.fetches

    def fetch(self, index: Annotated[Tensor, "b"], epoch: int, seed: int) -> Tensor:
        """Return decoded images or crops of them.

        Args:
            index: Positions [b].
            epoch: The epoch.
            seed: The seed.
        """
        return self.pictures.fetch_of(
            self.picture_of[index], self.ids[index], epoch, seed
        )  # another crop for each text

    def views(
        self, index: Annotated[Tensor, "b"], epoch: int, seed: int, fetched: Tensor | None = None
    ) -> tuple[Sided, Sided]:
        """Return a view of the images and the texts at some positions.

        Args:
            index: Positions [b].
            epoch: The epoch.
            seed: The seed.
            fetched: What ``fetch`` has returned for the same arguments, if it was called before.
        """
        images = self.fetch(index, epoch, seed) if fetched is None else fetched
        crops, _ = self.pictures.views_of(images, self.ids[index], epoch, seed)
        return Sided(first=crops), Sided(second=self.captions.views(index, epoch, seed)[0])

    def views_evaluated(self, index: Annotated[Tensor, "b"], epoch: int, seed: int) -> tuple[Sided, Sided]:
        """Return images and texts without augmentation and dropout.

        Args:
            index: Positions [b].
            epoch: Unused.
            seed: Unused.
        """
        return self.plain(index), Sided(second=self.captions.plain(index))

    def plain(self, index: Annotated[Tensor, "b"]) -> Sided:
        """Return the images at positions [b] without augmentation."""
        return Sided(first=self.pictures.plain(self.picture_of[index]))

    @classmethod
    def rebuilt(cls, record: dict[str, Any], options: TrainOptions) -> ImageTextEncoder:
        """Build the encoders of both sides.

        Args:
            record: Record of the training pairs, with the shape of the images.
            options: The options of the run.
        """
        of_texts = _for_texts(options).encoder
        texts = text_encoder(of_texts, options.dim, head="linear", seed=options.seed)
        return ImageTextEncoder(ImageData.rebuilt(record, options), texts)

    def record(self) -> dict[str, Any]:
        """Return the record of all kinds, with the shape of the images."""
        return {**super().record(), "shape": list(self.pictures.images.shape[1:])}

    def check_like(self, record: dict[str, Any]) -> None:
        """Raise if the number of channels differs from the record."""
        self.pictures.check_like(record)

    def shown(self, position: int) -> Shown:
        """Return the thumbnail and the shortened text of the pair at a position."""
        picture = self.pictures.shown(int(self.picture_of[position]))
        return replace(picture, text=shortened(self.captions.texts[position]))

    def measures(self, splits: Splits, options: TrainOptions) -> list[str]:
        """Return retrieval both ways, then each way.

        Args:
            splits: The splits of the run.
            options: The options of the run.
        """
        return ["both_ways", "image_to_text", "text_to_image"]

    def evaluate(self, splits: Splits, represent: Represent, options: TrainOptions) -> Evaluation:
        """Compute how often the nearest row of the other side belongs to the same document, and recall at 5 and 10.

        Args:
            splits: The splits of the run.
            represent: The features of the trained encoder.
            options: The options of the run.
        """
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

    def held_out_rows(self, share: float, seed: int) -> Annotated[Tensor, "n"]:
        """Hold out whole documents, so that no held-out image or text is trained on.

        Args:
            share: Share of the documents.
            seed: Seed of the division.
        """
        names, places = torch.unique(self.documents.cpu(), return_inverse=True)
        return stratified(None, len(names), share, seed, "more images with different texts")[places]

    def take(self, index: Annotated[Tensor, "m"]) -> Self:
        """Return the pairs at positions [m], with only the images that they need."""
        needed, picture_of = torch.unique(self.picture_of[index], return_inverse=True)
        pictures, captions = self.pictures.take(needed), self.captions.take(index)
        documents, ids = self.documents[index], self.ids[index]
        return replace(self, pictures=pictures, picture_of=picture_of, captions=captions, documents=documents, ids=ids)

    def content(self) -> Iterator[tuple[str, Tensor | Repeated | list[Any] | None]]:
        """Iterate over what the fingerprint covers, with the image of each pair even if pairs share a stored image."""
        for name, part in self.pictures.content():
            if name in ("images", "digests"):
                yield name, Repeated(part, self.picture_of) if isinstance(part, Tensor) else part
        yield "texts", self.captions.texts
        yield from (part for part in super().content() if part[0] != "picture_of")


def ranks(
    queries: Annotated[Tensor, "n d"], others: Annotated[Tensor, "n d"], documents: Annotated[Tensor, "n"]
) -> Annotated[Tensor, "n"]:
    """Count the other documents that are at least as near to a query as its own, each by its nearest row.

    Args:
        queries: Embeddings [n, d].
        others: Embeddings of the other side [n, d].
        documents: Document of each row [n], the same for both sides.

    Returns:
        Rank of each query's own document [n], 0 for the nearest.

    Example:
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
    """Parse a path into the file or folder, the columns in brackets, and the size of images after @."""
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
        raise ArgumentError(
            "data", what, f"columns {sorted(table)}", "name both columns: imagetext:TABLE[image,caption]"
        )
    return found


def _of_folder(folder: Path, columns: list[str]) -> tuple[list[Path], list[str]]:
    metadata = next((folder / name for name in METADATA if (folder / name).is_file()), None)
    if metadata is not None:
        return _of_table(metadata, columns)
    if columns:
        what = f"a table with the columns {', '.join(columns)}"
        raise NoFile("data", what, folder / METADATA[0], "which does not exist")
    files = [folder / name for name in image_files(folder)]
    pairs = [(file, file.with_suffix(".txt")) for file in files]
    if not pairs or not any(text.is_file() for _, text in pairs):
        what = "images with texts next to them: photo.jpg and photo.txt, or metadata.jsonl"
        raise NoFile("data", what, folder, "which has none")
    rows = [(file, line) for file, text in pairs for line in read_lines(text).texts]
    return [file for file, _ in rows], [line for _, line in rows]
