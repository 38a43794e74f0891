"""hn.mine of a data set against sentence-transformers' mine_hard_negatives: the same columns, negatives and scores."""

from __future__ import annotations

import copy
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import torch

import hardneg as hn
from hardneg.core.errors import ArgumentError, UnknownName
from hardneg.mining.explain import NoNegatives
from support.errors import raises
from support.libraries import part_of_sentence_transformers

datasets = pytest.importorskip("datasets", reason="needs the extra 'text'")
st = pytest.importorskip("sentence_transformers", reason="needs the extra 'text'")
beside_theirs = pytest.mark.skipif(
    version("sentence_transformers") < "5.3",
    reason="before 5.3 theirs fails with fewer documents than range_max, and widens margins of negative positives",
)


@pytest.fixture(scope="module")
def model() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(200)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    return st.SentenceTransformer(
        modules=[part_of_sentence_transformers("modules").StaticEmbedding(tokenizer, embedding_dim=16)], device="cpu"
    )


def words(random: Any, number: int) -> str:
    return " ".join(f"w{i}" for i in random.integers(0, 200, number))


@pytest.fixture(scope="module")
def pairs() -> Any:
    """60 rows of 45 anchors, some with several positives, some positives of several anchors, one row twice."""
    random = np.random.default_rng(0)
    anchors = [words(random, 5) for _ in range(45)]
    positives = [f"{anchor} {words(random, 3)}" for anchor in anchors]
    more = [(anchors[i], words(random, 6)) for i in range(0, 24, 2)] + [
        (anchors[40], positives[3]),
        (anchors[0], positives[0]),
    ]
    rows = [*zip(anchors, positives, strict=True), *more]
    return datasets.Dataset.from_dict({"question": [a for a, _ in rows], "answer": [p for _, p in rows]})


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    random = np.random.default_rng(1)
    return [words(random, 7) for _ in range(150)]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_negatives": 2, "range_min": 4},
    {"relative_margin": 0.05, "range_max": 230},
    {"absolute_margin": 0.1, "range_max": 230, "num_negatives": 4},
    {"max_score": 0.5, "min_score": 0.1, "range_max": 80},
    {"relative_margin": 0.05, "absolute_margin": 0.02, "range_min": 2, "range_max": 230},
]


@beside_theirs
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("given", [False, True], ids=["positives", "corpus"])
def test_the_negatives_are_those_of_sentence_transformers(
    model: Any, pairs: Any, corpus: list[str], options: dict[str, Any], given: bool
) -> None:
    documents = {"corpus": corpus} if given else {}
    for kind in ("triplet", "n-tuple", "labeled-pair", "labeled-list"):
        for scores in (False, True):
            shape = {"output_format": kind, "output_scores": scores, "verbose": False, **documents, **options}
            theirs = st.util.mine_hard_negatives(pairs, model, **shape)
            ours = hn.mine(pairs, model=model, **shape)
            assert ours.column_names == theirs.column_names
            assert len(ours) == len(theirs)
            for name in theirs.column_names:
                if name in ("score", "scores"):
                    first, second = (np.concatenate([np.atleast_1d(x) for x in each[name]]) for each in (ours, theirs))
                    np.testing.assert_allclose(first, second, atol=1e-6)
                else:
                    assert list(ours[name]) == list(theirs[name]), (kind, name)


@pytest.mark.parametrize("output_format", ["triplet", "n-tuple"])
def test_a_rule_that_leaves_no_negative_raises_with_a_fix(output_format: str, model: Any, pairs: Any) -> None:
    options: dict[str, Any] = {"negatives": "Threshold(0.99999)", "k": 3, "output_format": output_format}
    with pytest.raises(NoNegatives) as error:
        hn.mine(pairs, model=model, verbose=False, **options)
    assert error.value.fix
    assert "Threshold" in str(error.value.got)


@pytest.mark.filterwarnings("ignore:The negatives are easier")
def test_queries_are_short_only_if_the_corpus_is(model: Any, pairs: Any, corpus: list[str]) -> None:
    """Sentence-transformers cuts its list before it filters."""
    options = {"relative_margin": 0.9, "num_negatives": 2, "corpus": corpus, "verbose": False}
    theirs, ours = st.util.mine_hard_negatives(pairs, model, **options), hn.mine(pairs, model=model, **options)
    assert len(ours) > len(theirs)
    found = set(zip(*(ours[name] for name in ours.column_names), strict=True))
    assert set(zip(*(theirs[name] for name in theirs.column_names), strict=True)) <= found


def test_an_expression_and_any_function_of_texts(model: Any, pairs: Any) -> None:
    def encode(texts: list[str]) -> Any:
        return model.encode(texts, show_progress_bar=False)

    options = {"negatives": "BelowPositive(relative=0.05) * Rank(2, 40)", "k": 2, "verbose": False}
    first = hn.mine(pairs, model=model, **options)
    assert first.to_dict() == hn.mine(pairs, model=encode, **options).to_dict()
    same = hn.mine(pairs, model=model, relative_margin=0.05, range_min=2, range_max=40, num_negatives=2, verbose=False)
    assert same.to_dict() == first.to_dict()


def test_the_expression_is_printed(model: Any, pairs: Any, capsys: pytest.CaptureFixture[str]) -> None:
    hn.mine(pairs, model=model, relative_margin=0.1, range_max=30)
    printed = " ".join(capsys.readouterr().out.split())
    assert "BelowPositive(relative=0.1) * Rank(stop=30), draw 'top'" in printed


def test_a_random_choice_has_a_seed(model: Any, pairs: Any) -> None:
    options: dict[str, Any] = {"sampling_strategy": "random", "range_max": 30, "verbose": False}
    first, again, other = (hn.mine(pairs, model=model, seed=seed, **options).to_dict() for seed in (0, 0, 1))
    assert first == again != other


def test_a_cross_encoder_scores_and_a_guide_filters(model: Any, pairs: Any) -> None:
    def overlap(texts: list[tuple[str, str]]) -> Any:
        return [float(len(set(a.split()) & set(b.split()))) + len(b) / 1000 for a, b in texts]

    scored = hn.mine(pairs, model=model, cross_encoder=overlap, relative_margin=0.2, output_scores=True, verbose=False)
    for anchor, positive, negative, (own, other) in zip(*(scored[name] for name in scored.column_names), strict=True):
        assert own == pytest.approx(overlap([(anchor, positive)])[0], rel=1e-6)
        assert other == pytest.approx(overlap([(anchor, negative)])[0], rel=1e-6)
        assert other <= 0.8 * own + 1e-6
    with pytest.raises(ValueError, match="guide"):
        hn.mine(pairs, model=model, negatives='BelowPositive(absolute=0.0, by="guide")', k=1, verbose=False)
    hn.mine(pairs, model=model, guide=model, negatives='BelowPositive(absolute=0.0, by="guide")', k=1, verbose=False)


@beside_theirs
def test_prompts_and_a_cache(model: Any, pairs: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the cache's own files are in the current folder: the key is the model's alone
    shape = {
        "verbose": False,
        "query_prompt": "w1 w2 w3 ",
        "corpus_prompt": "w7 ",
        "relative_margin": 0.05,
        "range_max": 50,
    }
    theirs = st.util.mine_hard_negatives(pairs, model, **shape)
    pieces = []
    for _ in range(2):
        assert hn.mine(pairs, model=model, cache_folder=str(tmp_path), **shape).to_dict() == theirs.to_dict()
        pieces.append(sorted(tmp_path.glob("*.npy")))
    assert pieces[0] == pieces[1], "the second run encodes nothing"
    assert len(pieces[0]) == 2, "queries and documents"
    moved = copy.deepcopy(model)
    moved[0].embedding.weight.data += torch.randn(200, 16, generator=torch.Generator().manual_seed(1))
    again = hn.mine(pairs, model=moved, cache_folder=str(tmp_path), **shape).to_dict()
    assert again == hn.mine(pairs, model=moved, **shape).to_dict() != theirs.to_dict(), "other weights, other vectors"
    moved.truncate_dim = 8
    again = hn.mine(pairs, model=moved, cache_folder=str(tmp_path), **shape).to_dict()
    assert again == hn.mine(pairs, model=moved, **shape).to_dict(), "fewer numbers of the same weights"
    with raises(ArgumentError, who="mine", what="SentenceTransformer", got="a function"):
        hn.mine(pairs, model=model.encode, query_prompt="w1", verbose=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"negatives": "Uniform()", "relative_margin": 0.1}, "both, relative_margin"),
        ({"negatives": "Uniform()", "k": 2, "num_negatives": 2}, "both, num_negatives"),
        ({"draw": "gumbel", "sampling_strategy": "random"}, "both, sampling_strategy"),
        ({"include_positives": True}, "no include_positives"),
        ({"use_multi_process": True}, "torchrun"),
        ({"range_min": 9, "range_max": 9}, "a range_min below range_max=9"),
        ({"sampling_strategy": "best"}, "one of top, random"),
        ({"anchor_column_name": "anchor"}, r"a column among \['question', 'answer'\]"),
        ({"output_format": "pairs"}, "one of triplet"),
    ],
)
def test_what_cannot_be_meant_raises(model: Any, pairs: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hn.mine(pairs, model=model, verbose=False, **options)


def test_unknown_names_and_missing_models_raise(model: Any, pairs: Any) -> None:
    with raises(UnknownName, name="relativ_margin", nearest="relative_margin"):
        hn.mine(pairs, model=model, relativ_margin=0.1)
    with raises(ArgumentError, who="mine", got="model=None"):
        hn.mine(pairs)
    with raises(ArgumentError, who="mine", got="a dict of ['train']"):
        hn.mine(datasets.DatasetDict(train=pairs), model=model)
    with raises(ArgumentError, who="mine", what="known length", got="IterableDataset"):
        hn.mine(pairs.to_iterable_dataset(), model=model)
    for text in (" ", None):
        with raises(ArgumentError, who="mine", what="every row"):
            hn.mine(datasets.Dataset.from_dict({"a": ["x", text], "b": ["y", "z"]}), model=model)
    with raises(ArgumentError, who="mine", got="id=7 in row 0 (1 such row in all)", fix="anchor_column_name"):
        hn.mine(datasets.Dataset.from_dict({"id": [7], "a": ["x"], "b": ["y"]}), model=model)
    for options, message in (
        ({"corpus": "corpus.jsonl"}, r"a list of texts as corpus, got corpus='corpus\.jsonl'"),
        ({"model": 3}, "a SentenceTransformer, its path, or a function from texts to vectors, got model=3"),
        ({"cross_encoder": 3}, "a CrossEncoder, its path, or a function of pairs of texts, got cross_encoder=3"),
        ({"range_min": "a"}, "mine needs a whole number, got range_min='a'"),
    ):
        with pytest.raises(ArgumentError, match=message):
            hn.mine(pairs, **{"model": model, **options})
    with raises(ArgumentError, who="mine", got="corpus=[{'text': 'x'}]"):
        hn.mine(pairs, model=model, corpus=datasets.Dataset.from_dict({"text": ["x"]}))
