"""Encoders of texts: quick-thoughts' GRU, SimCSE's CLS token with its layer, and learning rates by kind of encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hardneg as hn
from hardneg.core.errors import ArgumentError
from hardneg.training.data.tokens import Ragged, tokenizer_for
from hardneg.training.options import RECIPES, SimCSEOptions
from hardneg.training.text_encoders import text_encoder
from support.errors import raises
from support.libraries import library
from support.texts import text_file
from support.training_runs import run, short

pytest.importorskip("accelerate", reason="training needs the extra train")


def test_a_gru_reads_the_words_in_their_order() -> None:
    """Cho et al. 2014: h = (1 - z) n + z h with update gate z, reset gate r and candidate n; the last h is it."""
    encoder = text_encoder("gru", dim=5, seed=0).double()
    texts = ["a ship at sea", "sea", "at ship sea a ship"]
    tokens = Ragged.of(texts, tokenizer_for("gru")).batch(torch.arange(3))
    cell, table = encoder.backbone.cell, encoder.backbone.table.weight  # type: ignore[union-attr]
    (w_r, w_z, w_n), (u_r, u_z, u_n) = cell.weight_ih_l0.chunk(3), cell.weight_hh_l0.chunk(3)
    (b_r, b_z, b_n), (c_r, c_z, c_n) = cell.bias_ih_l0.chunk(3), cell.bias_hh_l0.chunk(3)
    for row, length, found in zip(tokens.rows, tokens.lengths.tolist(), encoder(tokens), strict=True):
        h = torch.zeros(5, dtype=torch.float64)
        for word in row[:length]:
            x = table[word]
            r = torch.sigmoid(w_r @ x + b_r + u_r @ h + c_r)
            z = torch.sigmoid(w_z @ x + b_z + u_z @ h + c_z)
            n = torch.tanh(w_n @ x + b_n + r * (u_n @ h + c_n))
            h = (1.0 - z) * n + z * h
        torch.testing.assert_close(found, h, rtol=1e-9, atol=1e-9)
    assert not torch.equal(encoder.encode(["a ship"]), encoder.encode(["ship a"]))


def test_quick_thoughts_trains_two_grus(tmp_path: Path) -> None:
    data = text_file(tmp_path / "story.txt")
    run("quick-thoughts", tmp_path / "run", short(data, epochs=1, encoder="gru", dim=8))
    encoder = hn.load_encoder(tmp_path / "run")
    assert encoder.encode(["a ship", "the sea"]).shape == (2, 16)  # type: ignore[operator]
    with raises(ArgumentError, what="auto or linear"):
        run("moco", tmp_path / "other", short(data, head="mlp"))


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_simcse_compares_the_cls_token_behind_a_layer_with_tanh(pooling: str, tmp_path: Path) -> None:
    """Gao et al. 2021, sec. 6: an MLP on [CLS] in training, and [CLS] without it in evaluation."""
    library("sentence_transformers")
    from support.tiny_bert import texts, tiny_bert

    tiny_bert(tmp_path)
    (path,) = tmp_path.glob("bert-*")
    some = texts(80, seed=0)
    (tmp_path / "lines.txt").write_text("\n".join(some))
    given = {} if pooling == "cls" else {"token_pooling": "mean"}
    options = SimCSEOptions(data=f"text:{tmp_path / 'lines.txt'}", encoder=f"hf:{path}", **given)
    assert (options.head, options.token_pooling, options.learning_rate) == ("mlp", pooling, 3e-5)
    encoder = text_encoder(options.encoder, head="mlp", seed=0, pooling=pooling).eval()
    tokens = Ragged.of(some[:4], tokenizer_for(options.encoder)).batch(torch.arange(4))
    states = encoder.backbone.model(input_ids=tokens.rows, attention_mask=tokens.mask.long()).last_hidden_state
    for i, length in enumerate(tokens.lengths.tolist()):
        expected = states[i, 0] if pooling == "cls" else states[i, :length].mean(0)
        torch.testing.assert_close(encoder.features(tokens)[i], expected)
    layer = encoder.head[0]
    torch.testing.assert_close(encoder(tokens), torch.tanh(encoder.features(tokens) @ layer.weight.T + layer.bias))


def test_learning_rates_and_heads_are_those_of_the_kind_of_encoder(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "", "type": "models.StaticEmbedding"}]))
    for encoder, rate in (("auto", 1e-3), ("gru", 1e-3), ("hf:x", 3e-5), ("st:x", 3e-5), (f"st:{tmp_path}", 1e-3)):
        for recipe in ("simcse", "pairs", "quick-thoughts"):
            options: Any = RECIPES[recipe](encoder=encoder)
            assert options.learning_rate == rate
            published = recipe == "simcse" and encoder == "hf:x"
            assert (options.head, options.token_pooling) == (("mlp", "cls") if published else ("none", "mean"))
    assert SimCSEOptions(encoder="hf:x", learning_rate=0.5, head="none").learning_rate == 0.5
    assert SimCSEOptions(encoder="hf:x", head="none", token_pooling="mean").head == "none"
