"""Problems in mined lists: positives among the negatives (under any id), duplicates, missing negatives, hubs.

``find_problems`` checks lists by name (from files), ``find_problems_in_rows`` lists of rows (from tensors).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from hardneg.auditing.audited_pairs import AuditedPairs
from hardneg.auditing.inputs import Lists
from hardneg.auditing.measure import NUM_HUBS
from hardneg.auditing.result import Example, Hub, MinedFindings
from hardneg.core.tensors import unit

_same_vector = 1.0 - 1e-6  # cosine of a vector with itself, after rounding
_most_examples = 5  # enough to see the pattern on a page


def find_problems(
    lists: Lists,
    *,
    text_of: Mapping[Any, str] | None = None,
    row_of: Mapping[Any, int] | None = None,
    vectors: Annotated[Tensor, "n d"] | None = None,
    num_documents: int | None = None,
    queries_without: int | None = None,
) -> MinedFindings:
    """Check every list and count its problems.

    Args:
        lists: Positives and negatives of each query.
        text_of: Text of each name, to find duplicates; if omitted, the names themselves are compared.
        row_of: Row of each name in ``vectors``.
        vectors: Vectors [n, d] of the documents, to find duplicates whose texts differ.
        num_documents: Number of documents in the corpus; None if unknown.
        queries_without: Number of queries without any negative; None if unknown.
    """
    same, other, repeated = 0, 0, 0
    examples: list[Example] = []
    for query, positives, negatives in zip(lists.queries, lists.positives, lists.negatives, strict=True):
        own = set(positives)
        content = {name: _content(name, text_of, lists.are_texts) for name in (*positives, *negatives)}
        twin = {content[name]: name for name in positives}
        alike, earlier = _same_vectors(positives, negatives, row_of, vectors)
        seen: set[str] = set()
        for name in negatives:
            repeated += content[name] in seen or name in earlier
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
        short=_short(lists, queries_without),
        queries_without=queries_without,
        equal_to_positive=same,
        positive_under_another_id=other,
        repeated=repeated,
        compared_by=_compared(lists, text_of, vectors),
        documents=len(count),
        documents_in_corpus=num_documents,
        hubs=_hubs(count, num_documents),
        examples=tuple(examples),
    )


def _short(lists: Lists, queries_without: int | None) -> int:
    """Count queries with fewer negatives than wanted; those without any are empty lists in the file, or not in it."""
    length = lists.wanted or max((len(names) for names in lists.negatives), default=0)
    empty = sum(not names for names in lists.negatives) if length else 0
    return sum(0 < len(names) < length for names in lists.negatives) + max(queries_without or 0, empty)


def _content(name: Any, text_of: Mapping[Any, str] | None, is_text: bool) -> str:
    """Return the text by which copies of a document are found, ignoring case and spaces; its id if it has no text."""
    text = None if text_of is None else text_of.get(name)
    if text is None and not is_text:
        return f"\0{name}"
    return " ".join((str(name) if text is None else text).split()).casefold()


def _same_vectors(
    positives: Sequence[Any], negatives: Sequence[Any], row_of: Mapping[Any, int] | None, vectors: Tensor | None
) -> tuple[dict[Any, Any], set[Any]]:
    """Find negatives with the vector of a positive, or of an earlier negative in the list.

    Returns:
        The positive with the same vector, by name of the negative; and the negatives that copy an earlier one.
    """
    if row_of is None or vectors is None:
        return {}, set()
    near = [name for name in dict.fromkeys(positives) if name in row_of]
    far = [name for name in dict.fromkeys(negatives) if name in row_of]
    if not far:
        return {}, set()
    rows = torch.tensor([row_of[name] for name in (*near, *far)])
    normal = unit(vectors[rows].double())
    equal = (normal[len(near) :] @ normal.T >= _same_vector) & (rows[len(near) :, None] != rows)
    twins, earlier = equal[:, : len(near)], equal[:, len(near) :].tril(-1).any(1)
    alike = {
        name: near[int(hits.int().argmax())] for name, hits in zip(far, twins, strict=True) if near and bool(hits.any())
    }
    return alike, {name for name, is_copy in zip(far, earlier.tolist(), strict=True) if is_copy}


def _compared(lists: Lists, text_of: Mapping[Any, str] | None, vectors: Tensor | None) -> tuple[str, ...]:
    """Return the properties by which documents were compared: ids, texts, vectors."""
    alone = "texts as they are in the file" if lists.are_texts else "ids"
    by = [alone] if text_of is None else ["ids", "texts"]
    return (*by, "vectors") if vectors is not None else tuple(by)


def _hubs(count: Counter[Any], num_documents: int | None) -> tuple[Hub, ...]:
    """Return the most frequent negatives, compared with a uniform choice.

    The choice is over the corpus or, where its size is unknown, over the documents that occur in the lists.
    """
    total, size = count.total(), num_documents or len(count)
    return tuple(Hub(name, number / total, number / total * size) for name, number in count.most_common(NUM_HUBS))


def find_problems_in_rows(audited: AuditedPairs, listed: Annotated[Tensor, "q k"]) -> MinedFindings:
    """Check lists in memory [q, k]: rows of the candidates, reported under the candidates' names."""
    own: list[list[int]] = [[] for _ in range(len(listed))]
    if audited.pairs is not None:
        everyone = torch.arange(len(listed), device=audited.pairs.rows.device)
        for query, row in zip(*(each.tolist() for each in audited.pairs.of(everyone)), strict=True):
            own[query].append(row)
    rows = [[row for row in each if row >= 0] for each in listed.tolist()]
    name = {row: audited.name_of(row) for each in (*own, *rows) for row in each}
    lists = Lists(
        list(range(len(rows))),
        [[name[row] for row in each] for each in own],
        [[name[row] for row in each] for each in rows],
        listed.shape[1],
        are_texts=False,
    )
    row_of = {named: row for row, named in name.items()}
    return find_problems(
        lists,
        row_of=row_of,
        vectors=audited.candidates.vectors,
        num_documents=len(audited.candidates),
        queries_without=sum(not each for each in rows),
    )


def rows_of_lists(lists: Lists, row_of: Mapping[Any, int]) -> Annotated[Tensor, "q k"]:
    """Return the negatives as rows of the corpus [q, k], padded with -1; names without a row are skipped."""
    known = [[row_of[name] for name in names if name in row_of] for names in lists.negatives]
    width = max((len(each) for each in known), default=1) or 1
    return torch.tensor([[*each, *[-1] * (width - len(each))] for each in known], dtype=torch.long)
