"""What is wrong with mined lists: positives among the negatives, under any id, repeated and missing ones, hubs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hardneg.audits.lists import Lists
from hardneg.audits.measure import NUM_HUBS
from hardneg.audits.result import Example, Hub, MinedFindings
from hardneg.audits.subject import Subject

_same_vector = 1.0 - 1e-6  # the cosine of a vector with itself, after rounding
_most_examples = 5


def find(
    lists: Lists,
    *,
    text_of: Mapping[Any, str] | None = None,
    row_of: Mapping[Any, int] | None = None,
    vectors: Annotated[Tensor, "n d"] | None = None,
    num_documents: int | None = None,
    queries_without: int | None = None,
) -> MinedFindings:
    """Looks at every list.

    text_of: the text of each name; without it the names are compared as texts. row_of and vectors: where the vector of
    a name is, for copies that no text shows.
    """
    length = lists.wanted or max((len(names) for names in lists.negatives), default=0)
    same, other, repeated = 0, 0, 0
    examples: list[Example] = []
    for query, positives, negatives in zip(lists.queries, lists.positives, lists.negatives, strict=True):
        own = set(positives)
        content = {name: _content(name, text_of) for name in (*positives, *negatives)}
        twin = {content[name]: name for name in positives}
        alike = _same_vectors(positives, negatives, row_of, vectors)
        seen: set[str] = set()
        for name in negatives:
            repeated += content[name] in seen
            seen.add(content[name])
            if name in own:
                same += 1
            elif content[name] in twin or name in alike:
                other += 1
            else:
                continue
            if len(examples) < _most_examples:
                examples.append(Example(query, name, name if name in own else alike.get(name, twin.get(content[name]))))
    count = Counter(name for names in lists.negatives for name in names)
    return MinedFindings(
        queries=len(lists.queries),
        negatives=count.total(),
        wanted=lists.wanted,
        short=sum(len(names) < length for names in lists.negatives) + (queries_without or 0),
        queries_without=queries_without,
        equal_to_positive=same,
        positive_under_another_id=other,
        repeated=repeated,
        compared_by=_compared(text_of, vectors),
        documents=len(count),
        documents_in_corpus=num_documents,
        hubs=_hubs(count, num_documents),
        examples=tuple(examples),
    )


def _content(name: Any, text_of: Mapping[Any, str] | None) -> str:
    """What a document says, whatever its case and spaces; its name where that is not known."""
    text = str(name) if text_of is None else text_of.get(name, f"\0{name}")
    return " ".join(text.split()).casefold()


def _same_vectors(
    positives: Sequence[Any], negatives: Sequence[Any], row_of: Mapping[Any, int] | None, vectors: Tensor | None
) -> dict[Any, Any]:
    """The positive whose very vector a negative has, by name of the negative."""
    if row_of is None or vectors is None:
        return {}
    near = [name for name in positives if name in row_of]
    far = [name for name in negatives if name in row_of]
    if not near or not far:
        return {}
    first, second = (normalize(vectors[[row_of[name] for name in names]].double(), dim=-1) for names in (far, near))
    equal = first @ second.T >= _same_vector
    return {
        name: near[int(hits.int().argmax())]
        for name, hits in zip(far, equal, strict=True)
        if bool(hits.any()) and row_of[name] != row_of[near[int(hits.int().argmax())]]
    }


def _compared(text_of: Mapping[Any, str] | None, vectors: Tensor | None) -> tuple[str, ...]:
    by = ["names as they are in the file"] if text_of is None else ["ids", "texts"]
    return (*by, "vectors") if vectors is not None else tuple(by)


def _hubs(count: Counter[Any], num_documents: int | None) -> tuple[Hub, ...]:
    """Times an even choice, over the corpus or, where its size is not known, over the documents that occur."""
    total, size = count.total(), num_documents or len(count)
    return tuple(Hub(name, number / total, number / total * size) for name, number in count.most_common(NUM_HUBS))


def find_in_rows(subject: Subject, listed: Annotated[Tensor, "q k"]) -> MinedFindings:
    """Looks at lists in memory: rows of the candidates, under the names these have."""
    own: list[list[int]] = [[] for _ in range(len(listed))]
    if subject.pairs is not None:
        everyone = torch.arange(len(listed), device=subject.pairs.rows.device)
        for query, row in zip(*(each.tolist() for each in subject.pairs.of(everyone)), strict=True):
            own[query].append(row)
    rows = [[row for row in each if row >= 0] for each in listed.tolist()]
    name = {row: subject.name_of(row) for each in (*own, *rows) for row in each}
    lists = Lists(
        list(range(len(rows))),
        [[name[row] for row in each] for each in own],
        [[name[row] for row in each] for each in rows],
        listed.shape[1],
    )
    row_of = {named: row for row, named in name.items()}
    return find(lists, row_of=row_of, vectors=subject.candidates, num_documents=len(subject.candidates))


def as_rows(lists: Lists, row_of: Mapping[Any, int]) -> Annotated[Tensor, "q k"]:
    """The negatives as rows of the corpus, padded with -1."""
    known = [[row_of[name] for name in names if name in row_of] for names in lists.negatives]
    width = max((len(each) for each in known), default=1) or 1
    return torch.tensor([[*each, *[-1] * (width - len(each))] for each in known], dtype=torch.long)
