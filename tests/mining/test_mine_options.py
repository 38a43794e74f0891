"""`hardneg mine` with several retrievers, second models, imported distributions and ids: files in, files out."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hardneg.auditing.files import AuditOptions, audit_files
from hardneg.cli.app import app
from hardneg.core.errors import ArgumentError, MissingExtra, NoFile
from hardneg.io.tables import read_table
from hardneg.mining.encode import encoders_of_model
from hardneg.mining.estimate import estimate
from hardneg.mining.job import run
from hardneg.mining.options import MineOptions
from hardneg.mining.output import check_format
from support.errors import raises, warns
from support.libraries import part_of_sentence_transformers
from support.mining_jobs import lines, make_job


@pytest.fixture
def job(tmp_path: Path) -> MineOptions:
    return replace(make_job(tmp_path), negatives="Uniform()", k=4)


def write_run(job: MineOptions, name: str, lists: dict[str, list[str]]) -> str:
    path = Path(job.out).parent / f"{name}.trec"
    rows = [f"{q} Q0 {d} {r} {100 - r} x\n" for q, found in lists.items() for r, d in enumerate(found, 1)]
    path.write_text("".join(rows))
    return str(path)


def make_lists() -> dict[str, list[str]]:
    random = np.random.default_rng(0)
    return {f"q{i}": [f"d{j}" for j in random.permutation(60)[:12]] for i in range(20)}


def test_bm25_changes_the_default_draw(job: MineOptions) -> None:
    pytest.importorskip("bm25s", reason="needs the extra 'lexical'")
    run(job)
    dense = [row["negative_ids"] for row in lines(job.out)]
    run(replace(job, bm25=True))
    fused = lines(job.out)
    assert [row["negative_ids"] for row in fused] != dense
    assert any("+" in found for row in fused for found in row["found_by"])
    run(replace(job, bm25=True, quotas=("bm25=3", "embedding=1")))
    for row in lines(job.out):
        assert sum("bm25" in found for found in row["found_by"]) >= 3
    run(replace(job, bm25=True, negatives='From("bm25")'))
    assert all("bm25" in found for row in lines(job.out) for found in row["found_by"])


def test_runs_of_another_retriever_in_their_order(job: MineOptions) -> None:
    lists = make_lists()
    path = write_run(job, "splade", lists)
    run(replace(job, runs=(path,), negatives='From("splade")'))
    positives = {row["query_id"]: row["positive_ids"] for row in lines(job.out)}
    for row in lines(job.out):
        own = positives[row["query_id"]]
        assert row["negative_ids"] == [one for one in lists[row["query_id"]] if one not in own][:4]
    manifest = json.loads(Path(f"{job.out}.manifest.json").read_text())
    assert manifest["inputs"]["run splade"]["path"] == "splade.trec"
    run(replace(job, runs=(f"other={path}",), quotas=("other=2",)))
    assert all(sum("other" in found for found in row["found_by"]) >= 2 for row in lines(job.out))


def test_another_content_of_a_run_is_another_job(job: MineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = make_lists()
    given = replace(job, runs=(f"r={write_run(job, 'r', lists)}",), negatives='From("r")')
    run(given)
    first = lines(job.out)
    import hardneg.mining.job as module

    with monkeypatch.context() as patched:
        patched.setattr(module, "_finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(given)
    write_run(job, "r", {query: found[::-1] for query, found in lists.items()})
    run(given)
    assert lines(job.out) != first, "blocks of the old run were used"


def test_without_pyarrow_the_other_format_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with raises(MissingExtra, fix=".jsonl"):
        check_format(tmp_path / "mined.parquet")


def test_ids_in_every_format(job: MineOptions) -> None:
    pytest.importorskip("pyarrow", reason="needs the extra 'text'")
    texts = {row["text"]: row["id"] for row in lines(job.corpus)}  # type: ignore[arg-type]
    names = {row["query"]: row["id"] for row in lines(job.queries)}
    for kind in ("triplet", "n-tuple", "labeled-pair", "labeled-list"):
        for out in (job.out, job.out.replace(".jsonl", ".parquet")):
            run(replace(job, format=kind, ids=True, scores=kind == "triplet", out=out))
            table = read_table(out)
            rows = [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
            for row in rows:
                assert row["query_id"] == names[row["anchor"]]
                documents = [
                    row[name] for name in row if name in ("positive", "negative") or name.startswith("negative_")
                ]
                documents = documents[0] if kind == "labeled-list" else documents
                ids = [row["document_id"]] if kind == "labeled-pair" else row["document_ids"]
                assert ids == [texts[one] for one in documents]
            assert audit_files(AuditOptions(out)).mined is not None


def bert(folder: Path) -> str:
    """A cross-encoder of random weights."""
    transformers = pytest.importorskip("transformers", reason="needs the extra 'text'")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        *["cat", "dog", "fish", "bird", "tree", "rock", "river", "cloud", "sun", "moon", "star", "wind", "rain"],
    ]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        num_labels=1, max_position_embeddings=64,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(folder / "cross")
    fast.save_pretrained(folder / "cross")
    return str(folder / "cross")


def test_a_cross_encoder_reranks_or_vetoes_and_its_scores_are_kept(job: MineOptions, tmp_path: Path) -> None:
    st = pytest.importorskip("sentence_transformers", reason="needs the extra 'text'")
    path = bert(tmp_path)
    predict = st.CrossEncoder(path, device="cpu").predict
    rules = {"rerank": "BelowPositive(absolute=0.0)", "veto": "Uniform()"}
    for use, negatives in rules.items():
        given = replace(
            job,
            cross_encoder=path,
            cross_encoder_use=use,
            negatives=negatives,
            format="labeled-list",
            k=2,
            device="cpu",
        )
        run(given)
        rows = lines(job.out)
        assert rows
        for row in rows:
            scores = predict([(row["anchor"], document) for document in row["positive"]], show_progress_bar=False)
            assert row["teacher_scores"] == pytest.approx(scores.tolist(), abs=1e-4)
            assert all(one <= row["teacher_scores"][0] + 1e-4 for one in row["teacher_scores"][1:])
        manifest = json.loads(Path(f"{job.out}.manifest.json").read_text())
        assert manifest["inputs"]["cross-encoder"]["sha256"]
        asked = (
            "BelowPositive(absolute=0.0, by='guide') * Uniform()" if use == "veto" else "BelowPositive(absolute=0.0)"
        )
        assert manifest["negatives"].replace('"', "'") == asked
        assert manifest["versions"]["sentence-transformers"]
    estimate(given)


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> str:
    st = pytest.importorskip("sentence_transformers", reason="needs the extra 'text'")
    from tokenizers import Tokenizer, models, pre_tokenizers

    from support.mining_jobs import WORDS

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(("?", *WORDS))}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    folder = str(tmp_path_factory.mktemp("model"))
    static = part_of_sentence_transformers("modules").StaticEmbedding(tokenizer, embedding_dim=8)
    st.SentenceTransformer(modules=[static], device="cpu").save_pretrained(folder)
    return folder


def test_a_guide_filters_and_prompts_and_dtypes_have_their_own_vectors(job: MineOptions, static: str) -> None:
    import sentence_transformers as st

    model = st.SentenceTransformer(static, device="cpu")
    text = 'BelowPositive(absolute=0.1, by="guide")'
    guided = replace(job, guide=static, negatives=text, format="triplet", device="cpu")
    run(guided)
    for row in lines(job.out):
        vectors = torch.from_numpy(
            model.encode(list(row.values())[:3], normalize_embeddings=True, show_progress_bar=False)
        )
        assert float(vectors[0] @ vectors[2]) <= float(vectors[0] @ vectors[1]) - 0.1 + 1e-5
    estimate(guided)
    texts = [row["text"] for row in lines(job.corpus)]  # type: ignore[arg-type]
    plain = replace(job, encoder=None, model=static, device="cpu")
    run(plain)
    pieces = Path(f"{job.out}.embeddings")
    known = {path.name for path in pieces.glob("*.npy")}
    run(replace(plain, query_prompt="cat cat ", corpus_prompt="dog ", dtype="bfloat16"))
    new = [np.load(path) for path in pieces.glob("*.npy") if path.name not in known]
    prompted = model.to(torch.bfloat16).encode(texts, prompt="dog ", show_progress_bar=False)
    assert any(each.shape == prompted.shape and np.allclose(each, prompted) for each in new)
    run(plain)
    assert len(list(pieces.glob("*.npy"))) == len(known) + 2


def test_the_name_of_a_prompt_of_the_model_stands_for_that_prompt(
    job: MineOptions, static: str, tmp_path: Path
) -> None:
    import sentence_transformers as st

    folder = str(tmp_path / "prompted")
    prompts = {"search": "cat cat ", "query": "fish ", "document": "dog "}
    st.SentenceTransformer(static, device="cpu", prompts=prompts).save_pretrained(folder)
    encoders = [
        encoders_of_model(folder, 8, "cpu", prompts=(given, None))[0] for given in ("search", "cat cat ", None, "fish ")
    ]
    named, text, default, fish = (torch.from_numpy(each.encode(["sun moon"])) for each in encoders)
    assert torch.equal(named, text)
    assert torch.equal(default, fish)
    assert encoders[0].key == encoders[1].key
    with warns("unknown prompt"):
        encoders_of_model(folder, 8, "cpu", prompts=("serach", None))
    options = replace(job, encoder=None, model=folder, device="cpu", scores=True)
    run(replace(options, query_prompt="search"))
    found = lines(job.out)
    run(replace(options, query_prompt="cat cat "))
    assert found == lines(job.out)


OWN = """
from dataclasses import dataclass
from typing import ClassVar
from hardneg.negatives import Negatives

@dataclass(frozen=True, repr=False)
class EvenColumns(Negatives):
    masks: ClassVar = True

    def log_weight(self, tile):
        return tile.keep(tile.column % 2 == 0)
"""


def test_distributions_of_a_file_are_mined_and_audited(job: MineOptions, tmp_path: Path) -> None:
    (tmp_path / "mine_own.py").write_text(OWN)
    given = replace(job, negatives="EvenColumns()", imports=(str(tmp_path / "mine_own.py"),), draw="gumbel")
    run(given)
    assert all(int(one[1:]) % 2 == 0 for row in lines(job.out) for one in row["negative_ids"])
    manifest = json.loads(Path(f"{job.out}.manifest.json").read_text())
    assert manifest["inputs"]["import 1"]["path"] == "mine_own.py"
    with pytest.raises(NoFile):
        run(replace(given, imports=(str(tmp_path / "none.py"),)))
    (tmp_path / "broken.py").write_text("1 / 0")
    with raises(ArgumentError, who="mine", what="be importable", got="ZeroDivisionError: division by zero"):
        run(replace(given, imports=(str(tmp_path / "broken.py"),)))
    z = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)
    np.save(tmp_path / "z.npy", z)
    found = audit_files(
        AuditOptions(str(tmp_path / "z.npy"), ("EvenColumns()",), imports=(str(tmp_path / "mine_own.py"),))
    )
    assert found.row("EvenColumns()").effective_number < 16


def test_nothing_in_a_manifest_chooses_code_or_models(job: MineOptions, tmp_path: Path) -> None:
    """Neither of them is run or loaded by an audit, also where the manifest names files that exist."""
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\ndef encode(texts): ...\n")
    run(job)
    path = Path(f"{job.out}.manifest.json")
    manifest = json.loads(path.read_text())
    evil = str(tmp_path / "evil.py")
    manifest["options"] |= {"imports": [evil], "guide": evil, "cross_encoder": evil, "model": evil, "runs": [evil]}
    manifest["options"] |= {"encoder": "evil:encode", "rescore": "evil:encode", "cross_encoder_use": "veto"}
    manifest["inputs"]["import 1"] = {"path": "evil.py", "bytes": 1, "sha256": "0"}
    from hardneg.io.files import run_again, write_json

    manifest.pop("checksum", None)
    write_json(path, {key: value for key, value in manifest.items() if key != "seal"}, run_again)
    audit_files(AuditOptions(job.out))
    assert not marker.exists()


CHECKS: list[tuple[dict[str, Any], str]] = [
    ({"negatives": "OtherLabel()"}, "--label-column"),
    ({"negatives": 'BelowPositive(absolute=0.0, by="guide")'}, "--guide"),
    ({"negatives": 'From("bm25")'}, "add --bm25, --run"),
    ({"negatives": "SameCluster()"}, "OtherLabel"),
    ({"guide": "some-model"}, "uses the guide"),
    ({"quotas": ("bm25=2",)}, "a source among embedding"),
    ({"quotas": ("bm25",)}, "name=number"),
    ({"dtype": "float8", "model": "m", "encoder": None}, "--dtype"),
    ({"query_prompt": "query: "}, "--model as well"),
    ({"cross_encoder": "m", "cross_encoder_use": "both"}, "--cross-encoder-use"),
    ({"cross_encoder": "m", "rescore": "support.mining_jobs:overlap"}, "either --cross-encoder or --rescore"),
    ({"cross_encoder": "m", "cross_encoder_use": "veto", "guide": "m"}, "either --cross-encoder or --guide"),
    ({"runs": ("nowhere.trec",)}, "TREC run file that exists"),
]


@pytest.mark.parametrize(("options", "message"), CHECKS)
def test_what_is_missing_is_found_before_anything_is_read(job: MineOptions, options: Any, message: str) -> None:
    """In the words of the command line; the queries do not even exist."""
    from hardneg.cli.flags import flags_of
    from hardneg.core.errors import flags_in_errors

    with flags_in_errors({"mine": flags_of(MineOptions)}), pytest.raises(ValueError, match=message):
        run(replace(job, queries="nowhere.jsonl", **options))


def test_the_command_takes_lists_of_runs_and_quotas(job: MineOptions, tmp_path: Path, monkeypatch: Any) -> None:
    path = write_run(job, "r", make_lists())
    done = CliRunner().invoke(
        app,
        ["mine", job.queries, "--corpus", str(job.corpus), "--encoder", "support.mining_jobs:encode", "-n", "Uniform()",
         "--run", path, "--run", f"again={path}", "--quota", "r=1", "--quota", "embedding=1", "-k", "3", "--ids",
         "-o", job.out, "--format", "ids"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "20 queries" in done.output
    assert {found for row in lines(job.out) for each in row["found_by"] for found in each.split("+")} == {
        "r",
        "again",
        "embedding",
    }


def test_words_and_runs_are_fused_without_embeddings(job: MineOptions) -> None:
    pytest.importorskip("bm25s", reason="needs the extra 'lexical'")
    lists = make_lists()
    given = replace(job, encoder=None, search="bm25", runs=(f"r={write_run(job, 'r', lists)}",), k=6)
    run(given)
    fused = lines(job.out)
    run(replace(given, fusion="similarity"))
    assert [row["negative_ids"] for row in lines(job.out)] != [row["negative_ids"] for row in fused]
    assert {found for row in fused for found in row["found_by"]} == {"bm25+r"}  # the first of both lists


def test_names_of_runs_are_different(job: MineOptions) -> None:
    path = write_run(job, "r", make_lists())
    with pytest.raises(ArgumentError, match="write name=file"):
        run(replace(job, runs=(path, path)))
    with warns("run", "19 of 20"):
        run(replace(job, runs=(write_run(job, "one", {"q0": ["d5"]}),)))
