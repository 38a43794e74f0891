"""Texts and pairs: every recipe's loss by a plain loop, resumed runs, ranks, comparisons, pages, and wrong input."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from hardneg.comparing import Comparison, compare
from hardneg.comparing.arms import parse_arm
from hardneg.core.errors import ArgumentError, DataChanged, FileError, HardnegError, NoFile, UnknownName
from hardneg.reporting import write_report
from hardneg.training.data.inputs import Sided, TwoTowers, joined
from hardneg.training.data.items import Items
from hardneg.training.data.kinds import kind_of
from hardneg.training.data.pairs import TextPairs, VectorPairs
from hardneg.training.data.text_files import read_lines
from hardneg.training.data.texts import halves
from hardneg.training.data.tokens import Tokens, hashed_subwords, tokenizer_for, view_keys
from hardneg.training.evaluation.benchmarks import Benchmark, read_benchmark, spearman_parts
from hardneg.training.evaluation.protocols import transfer
from hardneg.training.loop.method import Batch, Method
from hardneg.training.loop.parts import splits
from hardneg.training.loop.runs import Run
from hardneg.training.options import RECIPES, PairsOptions
from hardneg.training.recipes.clip import CLIP
from hardneg.training.recipes.pairs import PairsRecipe
from hardneg.training.recipes.quick_thoughts import QuickThoughts
from hardneg.training.recipes.simcse import SimCSE
from hardneg.training.text_encoders import text_encoder
from hardneg.training.trained import load_encoder
from support.errors import raises
from support.html_page import Page
from support.texts import image_text_table, pair_table, sts_file, text_file, text_table, vector_file
from support.training_ranks import on_two_ranks, run_job
from support.training_runs import assert_same, interrupted, run
from support.training_runs import everything as all_of

pytest.importorskip("accelerate", reason="training needs the extra train")

MAKERS = {
    "simcse": text_file, "pairs": pair_table, "clip": vector_file, "quick-thoughts": text_file,
    "clip, images": image_text_table,
}  # fmt: skip
"""Of each recipe, and of a second kind of data behind a comma."""
SUFFIX = {"simcse": "txt", "pairs": "jsonl", "clip": "npz", "quick-thoughts": "txt", "clip, images": "jsonl"}
METHODS: dict[str, Any] = {"simcse": SimCSE, "pairs": PairsRecipe, "clip": CLIP, "quick-thoughts": QuickThoughts}
IDS = torch.tensor([4, 5, 7, 1, 0, 9])


def data_for(recipe: str, folder: Path) -> str:
    return MAKERS[recipe](folder / f"data.{SUFFIX[recipe]}")


def recipe_of(name: str) -> str:
    return name.partition(",")[0]


def short(data: str, **options: Any) -> dict[str, Any]:
    return {"data": data, "epochs": 2, "batch_size": 16, "log_every": 1, "dim": 12, "device": "cpu", **options}


def made(recipe: str, folder: Path, **options: Any) -> tuple[Any, Items, Batch]:
    """A method, its data and a batch."""
    wanted = RECIPES[recipe_of(recipe)](**short(data_for(recipe, folder), **options))
    data = splits(wanted).train.prepared(wanted)
    method: Method = METHODS[recipe_of(recipe)](wanted, data, 10)
    method.set_progress(3, 10)
    views = joined(data.views(IDS, 1, 2))
    return method, data, Batch(views, IDS, None, data.mined(IDS))


def assert_step(method: Method, batch: Batch, expected: Tensor) -> None:
    weights = [p for p in method.parameters() if p.requires_grad]
    loss = method.loss_of(method.encoder, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    found, wanted = (torch.autograd.grad(one, weights, allow_unused=True) for one in (loss, expected))
    scale = max(float(one.abs().max()) for one in wanted if one is not None)
    assert scale > 1e-4
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * scale)


# The losses, by plain loops.


def softmax_loss(positive: Tensor, negatives: list[Tensor]) -> Tensor:
    return torch.logsumexp(torch.stack([positive, *negatives]), 0) - positive


def test_simcse_is_one_direction_against_the_second_passes(tmp_path: Path) -> None:
    method, _, batch = made("simcse", tmp_path)
    z1, z2 = (normalize(method.encoder(view), dim=-1) for view in (batch.first, batch.second))
    s = z1 @ z2.T / 0.05
    losses = [softmax_loss(s[i, i], [s[i, j] for j in range(6) if j != i]) for i in range(6)]
    assert_step(method, batch, torch.stack(losses).mean())


def test_simcse_with_a_tilt_is_hcl(tmp_path: Path) -> None:
    method, _, batch = made("simcse", tmp_path, negatives="Tilt(1.0)", temperature=0.5)
    z1, z2 = (normalize(method.encoder(view), dim=-1) for view in (batch.first, batch.second))
    s, losses = z1 @ z2.T / 0.5, []
    for i in range(6):
        others = torch.stack([s[i, j] for j in range(6) if j != i])
        mean = (others.exp() * others.exp()).sum() / others.exp().sum()
        losses.append(-(s[i, i].exp() / (s[i, i].exp() + 5 * mean)).log())
    assert_step(method, batch, torch.stack(losses).mean())


@pytest.mark.parametrize(("directions", "ids"), [("one", True), ("both", True), ("one", False)])
def test_pairs_have_all_mined_negatives_and_never_a_text_of_their_own(
    directions: str, ids: bool, tmp_path: Path
) -> None:
    method, data, batch = made("pairs", tmp_path, directions=directions, ids=ids)
    assert batch.mined is not None
    parts = (batch.first, batch.second, batch.mined.inputs)
    z1, z2, z3 = (normalize(method.encoder(part), dim=-1) for part in parts)
    documents, mined = data.documents[IDS], batch.mined.ids  # type: ignore[attr-defined]
    assert int(documents[3]) == int(documents[4]), "two rows share their positive"
    if not ids:  # only the own row is no negative
        documents, mined = torch.arange(6), torch.full_like(mined, -1)
    ways = []
    for a, b, extra in ((z1, z2, True), (z2, z1, False)):
        losses = []
        for i in range(6):
            negatives = [a[i] @ b[j] / 0.05 for j in range(6) if documents[j] != documents[i]]
            if extra:
                negatives += [a[i] @ z3[k] / 0.05 for k in range(len(z3)) if mined[k] != documents[i]]
            losses.append(softmax_loss(a[i] @ b[i] / 0.05, negatives))
        ways.append(torch.stack(losses).mean())
    assert_step(method, batch, ways[0] if directions == "one" else (ways[0] + ways[1]) / 2)


def test_rows_of_one_first_text_share_their_document() -> None:
    data = TextPairs.of(["q", "q", "r", "s"], ["a", "b", "b", "c"], [["d"], ["c"], ["a"], ["b"]], "some")
    assert data.documents.tolist() == [0, 0, 0, 2]
    assert data.mined_ids == {"a": 0, "b": 0, "c": 2, "d": 3}


def test_mined_negatives_can_be_weighted_by_themselves(tmp_path: Path) -> None:
    method, data, batch = made("pairs", tmp_path, negatives="From('mined')")
    assert batch.mined is not None
    z1, z2, z3 = (normalize(method.encoder(part), dim=-1) for part in (batch.first, batch.second, batch.mined.inputs))
    documents, mined = data.documents[IDS], batch.mined.ids  # type: ignore[attr-defined]
    losses = [
        softmax_loss(z1[i] @ z2[i] / 0.05, [z1[i] @ z3[k] / 0.05 for k in range(12) if mined[k] != documents[i]])
        for i in range(6)
    ]
    assert_step(method, batch, torch.stack(losses).mean())


def test_clip_is_both_directions_with_a_learnt_temperature(tmp_path: Path) -> None:
    method, _, batch = made("clip", tmp_path)
    z1 = normalize(method.encoder.first(batch.views.first), dim=-1)
    z2 = normalize(method.encoder.second(batch.views.second), dim=-1)
    logits = z1 @ z2.T * method.scale.exp()
    own = torch.arange(6)
    cross = nn.functional.cross_entropy
    assert_step(method, batch, (cross(logits, own) + cross(logits.T, own)) / 2)


@pytest.mark.parametrize(("objective", "start"), [("sigmoid", -10.0), ("sigmoid(bias=-3.0)", -3.0)])
def test_clip_with_sigmoids_is_siglip_with_a_learnt_bias(objective: str, start: float, tmp_path: Path) -> None:
    method, _, batch = made("clip", tmp_path, objective=objective)
    (bias,) = method.loss.learnt
    assert bias.item() == start
    assert any(one is bias for one in method.parameters())
    z1 = normalize(method.encoder.first(batch.views.first), dim=-1)
    z2 = normalize(method.encoder.second(batch.views.second), dim=-1)
    logits = z1 @ z2.T * method.scale.exp() + bias
    sign = 2.0 * torch.eye(6) - 1.0
    assert_step(method, batch, -nn.functional.logsigmoid(sign * logits).sum() / 6)


def test_clip_learns_the_bias_of_its_sigmoids(tmp_path: Path) -> None:
    run("clip", tmp_path / "run", short(data_for("clip", tmp_path), objective="sigmoid"))
    (bias,) = (value for name, value in Run(tmp_path / "run").load()["method"].items() if "learnt" in name)
    assert float(bias) != -10.0


def test_clip_of_images_and_texts_leaves_out_the_pairs_of_one_image(tmp_path: Path) -> None:
    method, data, batch = made("clip, images", tmp_path)
    documents = data.documents[IDS]  # type: ignore[attr-defined]
    assert len(documents.unique()) < len(documents), "two texts of one image are in the batch"
    z1, z2 = (normalize(method.encoder(view), dim=-1) for view in (batch.first, batch.second))
    s, losses = z1 @ z2.T / method.temperature(), []
    for way in (s, s.T):
        for i in range(6):
            losses.append(softmax_loss(way[i, i], [way[i, j] for j in range(6) if documents[j] != documents[i]]))
    assert_step(method, batch, torch.stack(losses).mean())


def test_the_temperature_of_clip_can_leave_its_lowest_value(tmp_path: Path) -> None:
    method, _, batch = made("clip", tmp_path)
    with torch.no_grad():
        method.scale.fill_(9.0)
    method.after_step()
    assert method.temperature().item() == pytest.approx(0.01)
    (slope,) = torch.autograd.grad(method.loss_of(method.encoder, batch), [method.scale])
    assert float(slope) != 0.0


@pytest.mark.parametrize("encoders", ["one", "two"])
def test_quick_thoughts_predicts_the_neighbours_in_the_text(encoders: str, tmp_path: Path) -> None:
    method, data, batch = made("quick-thoughts", tmp_path, encoders=encoders)
    towers = (method.encoder.first, method.encoder.second) if encoders == "two" else (method.encoder,) * 2
    u, v = towers[0](batch.first), towers[1](batch.second)
    places = data.places[IDS].tolist()  # type: ignore[attr-defined]
    losses = []
    for i in range(6):
        scores = torch.stack([u[i] @ v[j] if i != j else torch.zeros(()) for j in range(6)])
        near = [j for j in range(6) if abs(places[i] - places[j]) == 1]
        losses.append(-sum((scores.log_softmax(0)[j] for j in near), torch.zeros(())) / max(1, len(near)))
    assert any(abs(a - b) == 1 for a in places for b in places)
    assert_step(method, batch, torch.stack(losses).mean())


@pytest.mark.parametrize("tau_plus", [0.05, 0.9])
def test_the_correction_of_quick_thoughts_has_the_floor_of_dot_products(tau_plus: float, tmp_path: Path) -> None:
    """HCL, eq. 4 with a dot product of at least -|u| |v|: E = max((mean - tau e^a) / (1 - tau), e^(-|u| |v| / t))."""
    method, data, batch = made("quick-thoughts", tmp_path, tau_plus=tau_plus, temperature=0.7, encoders="one")
    u, v = (method.encoder(view).double() for view in (batch.first, batch.second))
    places, longest = data.places[IDS].tolist(), v.norm(dim=1).max().detach()  # type: ignore[attr-defined]
    losses, floored = [], 0
    for i in range(6):
        scores = [u[i] @ v[j] / 0.7 if i != j else torch.zeros((), dtype=torch.float64) for j in range(6)]
        near = [j for j in range(6) if abs(places[i] - places[j]) == 1]
        mean = torch.stack([scores[j].exp() for j in range(6) if j not in near]).mean()
        terms = []
        for j in near:
            floor = (-u[i].norm().detach() * longest / 0.7).exp()
            rest = (mean - tau_plus * scores[j].exp()) / (1.0 - tau_plus)
            floored += int(rest <= floor)
            total = (6 - len(near)) * torch.maximum(rest, floor) + sum(scores[k].exp() for k in near)
            terms.append(total.log() - scores[j])
        losses.append(torch.stack(terms).mean() if terms else torch.zeros((), dtype=torch.float64))
    assert (floored > 0) == (tau_plus == 0.9)
    assert_step(method, batch, torch.stack(losses).mean().float())


# Inputs and encoders.


def test_the_dropout_of_a_row_is_its_own_in_any_batch_and_chunk(tmp_path: Path) -> None:
    method, data, batch = made("simcse", tmp_path)
    whole = method.encoder(batch.views)
    alone = torch.cat([method.encoder(joined(data.views(IDS[i : i + 1], 1, 2))[:1]) for i in range(6)])
    torch.testing.assert_close(whole[:6], alone)
    assert not torch.allclose(whole[:6], whole[6:])
    assert not torch.allclose(whole[:6], method.encoder(data.views(IDS, 2, 2)[0]))
    torch.testing.assert_close(method.encoder(data.plain(IDS)), method.encoder.eval()(data.plain(IDS)))
    share = (whole == 0).double().mean()
    assert 0.02 < share < 0.25


def test_joined_rows_without_keys_keep_everything() -> None:
    keyed = Tokens(torch.ones(2, 3, dtype=torch.long), torch.tensor([3, 2]), view_keys(torch.arange(2), 0, 0, 0))
    plain = Tokens(torch.ones(1, 5, dtype=torch.long), torch.tensor([5]))
    both = keyed.joined([plain])
    assert both.rows.shape == (3, 5)
    assert both.keys is not None
    assert both.keys[2] == 0
    assert both.mask.sum(1).tolist() == [3, 2, 5]
    assert len(both[1:]) == 2


def test_two_sides_are_cut_and_joined_like_one_batch() -> None:
    towers = TwoTowers(nn.Linear(3, 4), nn.Linear(5, 4))
    first, second = torch.randn(3, 3), torch.randn(2, 5)
    both = joined([Sided(first=first), Sided(second=second)])
    whole = towers(both)
    assert whole.shape == (5, 4)
    for low in range(5):
        for high in range(low + 1, 6):
            torch.testing.assert_close(towers(both[low:high]), whole[low:high])


def test_subwords_are_words_and_their_pieces() -> None:
    cats, cat, dog = (set(row) for row in hashed_subwords(["cats", "CAT", "dog"]))
    assert cats & cat
    assert not cat & dog
    assert hashed_subwords([""]) == [[]]


def test_texts_are_cut_at_what_the_model_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Short:
        model_max_length = 3

        def __call__(self, texts: list[str], *, max_length: int, truncation: bool) -> dict[str, Any]:
            return {"input_ids": [[1] * max_length for _ in texts]}

    library = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=lambda path: Short()))
    monkeypatch.setitem(sys.modules, "transformers", library)
    assert tokenizer_for("hf:no such model, cut at three")(["a b c d e"]) == [[1, 1, 1]]


@pytest.mark.parametrize("inside", ["", "0_StaticEmbedding"])
def test_static_models_are_trained_with_their_own_tokens(inside: str, tmp_path: Path) -> None:
    """The tokenizer adds special tokens, which StaticEmbedding leaves out."""
    library = pytest.importorskip("sentence_transformers", reason="needs the extra text")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    from support.libraries import part_of_sentence_transformers
    from support.tiny_bert import texts

    words = Tokenizer(models.WordLevel({"[CLS]": 64} | {f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 64)])
    static = part_of_sentence_transformers("modules").StaticEmbedding(words, embedding_dim=8)
    folder = tmp_path / "model"
    library.SentenceTransformer(modules=[static], device="cpu").save(str(folder))
    own = json.loads((folder / "modules.json").read_text())
    here = folder / own[0]["path"]
    (folder / inside).mkdir(exist_ok=True)
    for path in [*here.glob("tokenizer.json"), *here.glob("model.safetensors")]:
        path.rename(folder / inside / path.name)
    (folder / "modules.json").write_text(json.dumps([own[0] | {"path": inside}]))
    some = texts(60, 0)
    (tmp_path / "data.txt").write_text("\n".join(some))
    options = short(f"text:{tmp_path / 'data.txt'}", encoder=f"st:{folder}", epochs=1, encode_chunk=8)
    before = library.SentenceTransformer(str(folder), device="cpu").encode(some, convert_to_tensor=True)
    torch.testing.assert_close(text_encoder(f"st:{folder}").encode(some), before)
    run("simcse", tmp_path / "run", options)
    after = load_encoder(tmp_path / "run", run_code=True).encode(some)
    assert after.isfinite().all()
    assert not torch.allclose(after, before)


@pytest.mark.parametrize("kind", ["st", "hf"])
def test_models_of_the_libraries_are_trained(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers", reason="needs the extra text")
    from support.tiny_bert import texts, tiny_bert

    tiny_bert(tmp_path).save(str(tmp_path / "model"))
    where = tmp_path / "model" if kind == "st" else next(tmp_path.glob("bert-*"))
    (tmp_path / "data.txt").write_text("\n".join(texts(60, 0)))
    given = {"encoder": f"{kind}:{where}", "learning_rate": 1e-3, "token_pooling": "mean"}
    options = short(f"text:{tmp_path / 'data.txt'}", epochs=1, **given)
    result = run("simcse", tmp_path / "run", options)
    assert result["trained"]["encoder"]["name"] == f"{kind}:{where}"
    assert np.load(tmp_path / "run" / "embeddings.npz")["test_x"].shape == (12, 16)
    losses = [record["loss"] for record in Run(tmp_path / "run").metrics()]
    assert losses[-1] < losses[0]


# Runs.


@pytest.mark.parametrize("name", MAKERS)
def test_a_killed_run_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    recipe, options = recipe_of(name), short(data_for(name, tmp_path))
    run(recipe, tmp_path / "whole", options)
    with interrupted(7):
        run(recipe, tmp_path / "cut", options)
    run(recipe, tmp_path / "cut", options, resume=True)
    assert_same(all_of(tmp_path / "whole"), all_of(tmp_path / "cut"))


@pytest.mark.parametrize("recipe", ["simcse", "moco"])
@pytest.mark.parametrize("given", [{}, {"weight_decay": 1e-6}], ids=str)
def test_subwords_that_never_occur_keep_their_weights_without_weight_decay(
    recipe: str, given: dict[str, float], tmp_path: Path
) -> None:
    """Of a decay of 1e-6 Adam makes a whole step towards 0 where a weight has no gradient."""
    options = RECIPES[recipe](**short(text_file(tmp_path / "data.txt"), **given))
    data = splits(options).train.prepared(options)
    seen = torch.cat([tokens.rows.flatten() for tokens in data.views(torch.arange(len(data)), 0, 0)]).unique()
    run(recipe, tmp_path / "run", options.as_dict())
    before = data.encoder(options).state_dict()["backbone.table"]
    after = Run(tmp_path / "run").load()["method"]["encoder.backbone.table"]  # type: ignore[index]
    moved, unseen = (after != before).any(dim=1), torch.ones(len(before), dtype=torch.bool)
    unseen[seen] = False
    assert moved[seen].any()
    assert moved[unseen].all() if given else not moved[unseen].any()


@pytest.mark.slow
def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    jobs = [
        {"name": name, "recipe": recipe_of(name), "options": short(data_for(name, tmp_path), learning_rate=1e-5)}
        for name in MAKERS
    ]
    jobs[0]["options"]["encode_chunk"] = 5  # type: ignore[index]
    on_two_ranks(jobs, tmp_path / "two")
    for job in jobs:
        run_job(job, tmp_path / "one")
        name = str(job["name"])
        one, two = (Run(tmp_path / where / name) for where in ("one", "two"))
        losses = [[record["loss"] for record in each.metrics()] for each in (one, two)]
        assert np.ptp(losses[0]) > 1e-4
        np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
        weights = [each.load()["method"] for each in (one, two)]  # type: ignore[index]
        for key, value in weights[0].items():
            assert (weights[1][key] - value).abs().max() <= 0.03 * 1e-5 * len(losses[0]) + 1e-7, key


@pytest.mark.usefixtures("runs_here")
def test_texts_with_classes_are_compared_and_shown(tmp_path: Path) -> None:
    data = text_table(tmp_path / "notes.jsonl", 120)
    arms = ("simcse()", "simcse(negatives='Tilt(1.0)', temperature=0.1)")
    comparison = Comparison(arms, 3, short(data, epochs=1) | {"evaluate_with": sts_file(tmp_path / "sts.tsv")})
    summary = compare(comparison, tmp_path / "out", jobs=1, show=lambda line: None)
    assert summary["metric"] == "sts"
    assert summary["verdicts"][0]["num_test"] == 60
    assert summary["verdicts"][0]["half_width"] > 0
    page = Page(write_report(tmp_path / "out").read_text())
    assert "Spearman on STS" in page.words
    assert "trains an encoder of texts by" in page.words
    assert "false negative" in page.words
    assert "harbour" in page.words


def test_without_labels_texts_are_compared_by_their_halves(tmp_path: Path) -> None:
    result = run("simcse", tmp_path / "run", short(text_file(tmp_path / "a.txt")))
    assert result["headline"] == "retrieval"
    assert "knn" not in result
    page = Page(write_report(tmp_path / "run").read_text())
    assert "retrieval of the second view" in page.words
    assert "nearest of other classes" not in page.words


def test_the_halves_of_a_text_without_spaces_differ() -> None:
    assert halves("\u4f60\u597d\u4e16\u754c") == ("\u4f60\u597d", "\u4e16\u754c")
    assert halves("one two three") == ("one", "two three")
    assert halves("x") == ("x", "x")


def test_the_figure_of_sts_is_the_mean_of_its_parts_and_of_its_tasks(tmp_path: Path) -> None:
    stats = pytest.importorskip("scipy.stats", reason="needs the extra eval")
    random = np.random.default_rng(0)
    first = random.integers(0, 6, 200).astype(float)
    second = first + random.normal(size=200) * 2
    parts = spearman_parts(first, second)
    rho = stats.spearmanr(first, second).statistic
    assert parts.mean() == pytest.approx(rho, abs=1e-12)
    # The parts have the spread of the jackknife of the correlation.
    left_out = [stats.spearmanr(np.delete(first, i), np.delete(second, i)).statistic for i in range(200)]
    assert np.std(parts) / 200**0.5 == pytest.approx(np.std(left_out) * 199 / 200**0.5, rel=0.05)
    options = short(text_file(tmp_path / "a.txt"), evaluate_with=sts_file(tmp_path / "sts.tsv"), epochs=1)
    result = run("simcse", tmp_path / "run", options)
    assert result["sts"] == pytest.approx(sum(result["sts_tasks"].values()) / 2, abs=1e-6)


def test_validation_reads_the_dev_split_of_a_benchmark(tmp_path: Path) -> None:
    rows = ["split\tscore\tsentence1\tsentence2", *(f"dev\t{i}\ta b\ta {'b' * i}" for i in range(3))]
    (tmp_path / "sts.tsv").write_text("\n".join([*rows, "test\t1\tx\ty", "test\t2\tx\ty"]))
    found = read_benchmark(Benchmark("sts", tmp_path / "sts.tsv"), "validation")
    assert [pair.score for pair in found] == [0.0, 1.0, 2.0]  # type: ignore[union-attr]
    assert len(read_benchmark(Benchmark("sts", tmp_path / "sts.tsv"), "test")) == 2  # type: ignore[arg-type]
    with raises(ArgumentError, who="train", what="with qrels/dev.tsv"):
        read_benchmark(Benchmark("ndcg@10", tmp_path), "validation")


def test_a_transfer_leaves_the_benchmark_of_the_run_out(tmp_path: Path) -> None:
    data = text_table(tmp_path / "notes.jsonl", 120)
    run("simcse", tmp_path / "run", short(data, epochs=1, evaluate_with=sts_file(tmp_path / "sts.tsv")))
    (tmp_path / "sts.tsv").unlink()
    found = transfer(tmp_path / "run", data)
    assert "knn" in found
    assert "sts" not in found


def test_quick_thoughts_is_an_arm_of_its_own_name() -> None:
    arm = parse_arm("quick-thoughts(encoders='one', negatives='Tilt(0.5)')")
    assert (arm.recipe, arm.options["encoders"]) == ("quick-thoughts", "one")
    assert arm.complete().batches == "consecutive()"
    with pytest.raises(UnknownName, match="encoders"):
        parse_arm("quick-thoughts(encoder_s='one')")


# Wrong input.


def written(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize(
    ("recipe", "name", "content", "error", "match"),
    [
        ("simcse", "text:none.txt", None, NoFile, "a file of texts"),
        ("simcse", "text:", None, ArgumentError, r"text:FILE or text:TABLE\[column,label\]"),
        ("simcse", "text:a.txt[]", "x", ArgumentError, "text:FILE or"),
        ("simcse", "text:a.txt", " \n\n", ArgumentError, "at least one sentence, got none"),
        ("simcse", "text:a.csv[b]", "a,c\n1,2", UnknownName, "'b' is not known"),
        ("simcse", "text:a.csv[a]", "a,c\nx,y\n ,z", FileError, "a text in every row of the column 'a'.*row 1"),
        ("simcse", "text:a.csv[a,c]", "a,c\nx,0\ny,\nz,1", ArgumentError, "for every item or for none, got 1 of 3"),
        ("simcse", "text:a.jsonl[a,c]", '{"a": "x", "c": 0}\n{"a": "y"}', ArgumentError, "for none, got 1 of 2"),
        (
            "simcse",
            "text:a.jsonl[a,c]",
            '{"a": "x", "c": ["k", "l"]}\n{"a": "y", "c": ["k"]}',
            FileError,
            "one label in",
        ),
        ("simcse", "text:a.txt", "one\ntwo\nthree", ArgumentError, "--batch-size of at most the 2 texts"),
        ("pairs", "pairs:a.csv", "a,b,c\n1,2,3", ArgumentError, "two columns of texts"),
        ("pairs", "pairs:a.csv[a]", "a,b\n1,2", ArgumentError, "pairs:FILE or"),
        ("pairs", "pairs:a.txt", "one\n\ntwo\n\nthree", ArgumentError, "consecutive lines"),
        ("clip", "embeddings:none.npz", None, NoFile, "`first`|first, second"),
        ("clip", "embeddings:", None, ArgumentError, "embeddings:FILE.npz"),
        ("quick-thoughts", "text:a.txt", "a b\n\n" * 40, ArgumentError, "consecutive lines, got .* no two sentences"),
        ("quick-thoughts", "pairs:a.txt", "a b\n" * 40, ArgumentError, "sentences in their order"),
    ],
)
def test_wrong_data_is_reported_and_nothing_is_left(
    recipe: str, name: str, content: str | None, error: type[Exception], match: str, tmp_path: Path
) -> None:
    kind, _, file = name.partition(":")
    if content is not None:
        written(tmp_path, file.partition("[")[0], content)
    data = f"{kind}:{tmp_path / file}" if file else name
    with pytest.raises(error, match=match):
        run(recipe, tmp_path / "run", short(data))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("recipe", "options", "match"),
    [
        ("simcse", {"encoder": "resnet18"}, "--encoder: 'resnet18' is not known. .*Known: auto, hashed, gru, hf:PATH"),
        ("simcse", {"encoder": "hf:"}, "Known: auto, hashed"),
        ("simcse", {"augment": "cifar"}, "--augment auto"),
        ("simcse", {"evaluate_with": "sts"}, "--evaluate-with: train needs sts:PATH or beir:PATH"),
        ("simcse", {"evaluate_with": "sts:/no/file"}, "a benchmark that exists"),
        ("simcse", {"negatives": "From('mined')"}, "--negatives for candidates of the batch"),
        ("pairs", {"negatives": "From('mined')", "directions": "both"}, "candidates of the batch.* --directions one"),
        ("quick-thoughts", {"batches": "uniform()"}, r"--batches to be consecutive\(\)"),
        ("clip", {"temperature": "linear(0.5, 0.1)"}, "a number as --temperature"),
        ("clip", {"encoder": "tiny"}, "Known: auto, linear, adapter"),
        ("clip", {"evaluate_with": "sts:x"}, "no --evaluate-with for pairs"),
    ],
)
def test_wrong_options_are_reported_before_the_run(
    recipe: str, options: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(HardnegError, match=match):
        run(recipe, tmp_path / "run", short(data_for(recipe, tmp_path), **options))
    assert not (tmp_path / "run").exists()


def test_packed_lines_are_read_as_others(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbfone\r\n\r\ntwo \xe2\x80\xa8 parts\nthree"
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content))
    plain, packed = read_lines(tmp_path / "a.txt"), read_lines(tmp_path / "a.txt.gz")
    assert plain == packed
    assert plain.texts == ["one", "two \u2028 parts", "three"]
    (tmp_path / "a.txt").write_bytes("café".encode("utf-16"))
    with raises(FileError, who="data", path="a.txt", got="byte 0"):
        read_lines(tmp_path / "a.txt")


def test_infograph_of_other_items_names_the_data(tmp_path: Path) -> None:
    for data, noun in ((text_file(tmp_path / "a.txt"), "texts"), ("digits", "images")):
        with pytest.raises(ArgumentError, match=f"infograph needs graphs, .* of {noun}; use --data graphs:NAME"):
            run("infograph", tmp_path / "run", short(data))


def test_negatives_that_were_not_mined_are_reported_before_the_run(tmp_path: Path) -> None:
    data = pair_table(tmp_path / "a.jsonl", num_negatives=0)
    for negatives in ("From('mined')", "Tilt(5.0, source='mined')"):
        with raises(ArgumentError, who="train", what="the batch", fix="a.jsonl"):
            run("pairs", tmp_path / "run", short(data, negatives=negatives))
        arms = ("pairs()", f'pairs(negatives="{negatives}")')
        with raises(ValueError, what="be trained"):
            compare(Comparison(arms, 2, short(data)), tmp_path / "compared", jobs=1)
    assert not (tmp_path / "run").exists()


def test_a_wrong_benchmark_is_reported_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "bad.tsv").write_text("score\tsentence1\n1\ta\n")
    (tmp_path / "same.tsv").write_text("score\tsentence1\tsentence2\n1\ta\tb\n1\tc\td\n")
    for name, match in (
        ("bad.tsv", "--evaluate-with: .*a column of .*sentence2"),
        ("same.tsv", "--evaluate-with: .*different scores in task same"),
        ("none.tsv", "that exists"),
    ):
        with pytest.raises(HardnegError, match=match):
            run(
                "simcse", tmp_path / "run", short(text_file(tmp_path / "a.txt"), evaluate_with=f"sts:{tmp_path / name}")
            )
        assert not (tmp_path / "run").exists()


def test_a_model_that_is_not_there_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra text")
    options = short(text_file(tmp_path / "a.txt"), encoder=f"hf:{tmp_path / 'none'}")
    with raises(ArgumentError, who="train", what="a tokenizer"):
        run("simcse", tmp_path / "run", options)


def test_vectors_that_do_not_fit_are_reported(tmp_path: Path) -> None:
    for arrays, match in (
        ({"first": np.zeros((4, 2)), "second": np.zeros((3, 2))}, r"second=\(3, 2\)"),
        ({"first": np.zeros(4), "second": np.zeros((4, 2))}, r"first=\(4,\)"),
        ({"first": np.full((4, 2), np.nan), "second": np.zeros((4, 2))}, "finite numbers in first"),
    ):
        np.savez(tmp_path / "wrong.npz", **arrays)
        with pytest.raises(HardnegError, match=match):
            run("clip", tmp_path / "run", short(f"embeddings:{tmp_path / 'wrong.npz'}"))


def adapted(path: Path, **more: Any) -> str:
    """Vectors in which every second item belongs to two pairs, and a mined negative of each pair."""
    random = np.random.default_rng(1)
    items = random.normal(size=(40, 8))
    owner = np.repeat(np.arange(40), 2)
    first = items[owner] + 0.5 * random.normal(size=(80, 8))
    other = (owner + 3) % 45  # some numbers are of no pair
    mined = np.where(other[:, None] < 40, items[other % 40], 1.0)[:, None]
    arrays = {"first": first, "second": items[owner], "documents": [f"d{i}" for i in owner], "negatives": mined}
    np.savez(path, **{**arrays, "negative_documents": np.array([[f"d{i}"] for i in other]), **more})
    return f"embeddings:{path}"


def test_vectors_know_their_documents_and_mined_negatives(tmp_path: Path) -> None:
    options = PairsOptions(data=adapted(tmp_path / "pairs.npz"), encoder="adapter", dim=8)
    data = VectorPairs.read(str(tmp_path / "pairs.npz"), options)
    mined = data.mined(torch.tensor([0, 79]))
    assert mined is not None
    vectors = mined.inputs[:].second  # type: ignore[attr-defined]
    other = (np.repeat(np.arange(40), 2) + 3) % 45
    by_number = {int(number): i // 2 for i, number in enumerate(data.documents)}
    assert [by_number.get(int(one), -1) for one in mined.ids] == [3, -1]
    assert other[79] == 42
    assert torch.equal(vectors[0], data.second[6])
    encoder = data.encoder(options)
    both = torch.cat([data.first[:3], data.second[:2]])
    assert torch.equal(encoder(Sided(data.first[:3], data.second[:2])), both)  # an adapter begins as the identity


def test_an_adapter_learns_from_mined_negatives_and_is_rebuilt(tmp_path: Path) -> None:
    options = short(adapted(tmp_path / "pairs.npz"), encoder="adapter", dim=8, epochs=30, batch_size=16)
    result = run("pairs", tmp_path / "run", options)
    found = VectorPairs.splits(PairsOptions(**options))
    first, second = found.test.first, found.test.second
    encoder = load_encoder(tmp_path / "run")
    with torch.no_grad():
        z1, z2 = encoder(Sided(first=first)), encoder(Sided(second=second))
    right = [
        all(
            torch.cosine_similarity(a, z2[i], dim=0) > torch.cosine_similarity(a, b, dim=0)
            for j, b in enumerate(z2)
            if found.test.documents[i] != found.test.documents[j]
        )
        for i, a in enumerate(z1)
    ]
    assert result["retrieval"] == pytest.approx(np.mean(right))
    assert not torch.equal(z1, first)


@pytest.mark.parametrize(
    ("arrays", "options", "what"),
    [
        ({"documents": np.zeros(3)}, {}, "documents"),
        ({"negatives": np.zeros((80, 1, 9))}, {}, "negatives"),
        ({"negative_documents": np.zeros((80, 2))}, {}, "negative_documents"),
        ({"second": np.zeros((80, 9)), "negatives": np.zeros((80, 1, 9))}, {"encoder": "adapter", "dim": 8}, "width"),
        ({}, {"encoder": "adapter", "dim": 9}, "width"),
        ({}, {"encoder": "resnet18"}, "adapter"),
        ({"test": np.zeros(80)}, {}, "`test`"),
        ({"test": np.zeros(80, bool)}, {}, "`test`"),
    ],
)
def test_vectors_of_a_wrong_shape_are_refused(tmp_path: Path, arrays: Any, options: Any, what: str) -> None:
    data = adapted(tmp_path / "pairs.npz", **arrays)
    with pytest.raises(ArgumentError) as caught:
        run("pairs", tmp_path / "run", short(data, **options))
    error = caught.value
    assert what in f"{error.what} {error.got} {getattr(error, 'known', '')}"


def test_vectors_name_their_test_pairs(tmp_path: Path) -> None:
    test = np.arange(80) % 3 == 0
    found = VectorPairs.splits(PairsOptions(data=adapted(tmp_path / "a.npz", test=test), encoder="adapter", dim=8))
    assert [found.train.ids.tolist(), found.test.ids.tolist()] == [
        np.nonzero(part)[0].tolist() for part in (~test, test)
    ]
    whole = VectorPairs.splits(PairsOptions(data=adapted(tmp_path / "b.npz"), encoder="adapter", dim=8))
    assert len(whole.test) != len(found.test)


def test_without_ids_pairs_of_one_document_are_negatives_of_each_other(tmp_path: Path) -> None:
    losses = {}
    for name, ids, numbers in (("masked", True, None), ("unmasked", False, None), ("distinct", True, np.arange(80))):
        more = {} if numbers is None else {"documents": numbers, "negative_documents": np.full((80, 1), -1)}
        data = adapted(tmp_path / f"{name}.npz", **more)
        run("pairs", tmp_path / name, short(data, epochs=1, encoder="adapter", dim=8, ids=ids, log_every=1))
        losses[name] = [record["loss"] for record in Run(tmp_path / name).metrics()]
    assert losses["unmasked"] == losses["distinct"]
    assert losses["unmasked"][0] > losses["masked"][0]


def test_every_kind_says_what_its_items_are() -> None:
    nouns = [kind_of(name).noun for name in ("digits", "text:x", "pairs:x", "embeddings:x", "imagetext:x")]
    assert nouns == ["image", "text", "text", "pair", "pair"]


def test_a_changed_benchmark_is_other_data(tmp_path: Path) -> None:
    options = short(text_file(tmp_path / "a.txt"), evaluate_with=sts_file(tmp_path / "sts.tsv"), epochs=1)
    run("simcse", tmp_path / "run", options)
    (tmp_path / "sts.tsv").write_text("\n".join((tmp_path / "sts.tsv").read_text().splitlines()[:-2]))
    with pytest.raises(DataChanged, match="benchmark"):
        run("simcse", tmp_path / "run", options, resume=True)
