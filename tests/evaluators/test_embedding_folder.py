"""Embedders from a folder in sentence-transformers' layout, and the cache."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

from evaluators.embedding import (
    CachedEmbedder,
    EmbedderUnavailableError,
    MiniLMEmbedder,
    load_embedder,
    minilm_folder,
)
from evaluators.sentence_folder import UnsupportedEmbedderError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d", "##d"]
MEAN = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}


def modules(*kinds, pooling="1_Pooling"):
    paths = {"Transformer": "", "Pooling": pooling}
    return [
        {"idx": i, "name": str(i), "path": paths.get(kind, f"{i}_{kind}"), "type": f"x.y.{kind}"}
        for i, kind in enumerate(kinds)
    ]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentence") / "tiny-encoder"
    folder.mkdir()
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps(MEAN))
    (folder / "modules.json").write_text(json.dumps(modules("Transformer", "Pooling", "Normalize")))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "tiny-encoder")


def test_a_folder_is_pooled_by_the_mean_and_normalised(folder):
    embedder = load_embedder(folder)
    model = BertModel.from_pretrained(folder).eval()
    tokenizer = BertTokenizerFast.from_pretrained(folder)
    with torch.no_grad():
        hidden = model(**tokenizer("a b c", return_tensors="pt")).last_hidden_state[0]
    mean_D = hidden.mean(0)
    expected = (mean_D / mean_D.norm()).numpy()
    e_N_D = embedder.embed(["a b c", " ", "a b c d d d d d"])
    assert e_N_D[0] == pytest.approx(expected, abs=1e-6)
    assert np.linalg.norm(e_N_D, axis=1) == pytest.approx([1, 0, 1], abs=1e-6)


def test_the_id_names_folder_weights_and_length(folder):
    name, pooling, length = load_embedder(folder).id.split("/")
    assert name.startswith("tiny-encoder@")
    assert len(name) == len("tiny-encoder@") + 12
    assert (pooling, length) == ("mean", "12")
    assert load_embedder(folder, max_tokens=10).id.endswith("/mean/10")


def test_other_weights_have_another_id(folder, original):
    torch.manual_seed(4)
    BertModel(BertConfig.from_pretrained(folder)).save_pretrained(folder)
    assert load_embedder(folder).id != load_embedder(original).id


def test_only_the_folders_length_is_read(folder):
    embedder = load_embedder(folder)
    e_N_D = embedder.embed(["a " * 20, "a " * 30 + "b"])
    assert e_N_D[0] == pytest.approx(e_N_D[1], abs=1e-6)


def test_lower_casing_is_applied(folder):
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"), do_lower_case=False)
    tokenizer.save_pretrained(folder)

    def cosine():
        e_N_D = load_embedder(folder).embed(["A b", "a b"])
        return float(e_N_D[0] @ e_N_D[1])

    assert cosine() < 0.999
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    assert cosine() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("kinds", "pooling", "problem"),
    [
        (("Transformer", "Pooling", "Dense"), MEAN, "Dense"),
        (("StaticEmbedding",), MEAN, "StaticEmbedding"),
        ((), MEAN, "nothing"),
        (("Transformer", "Pooling"), {"pooling_mode_cls_token": True}, "cls_token"),
        (("Transformer", "Pooling"), {**MEAN, "pooling_mode_max_tokens": True}, "max_tokens"),
        (("Transformer", "Pooling"), {"pooling_mode": "lasttoken"}, "lasttoken"),
        (("Transformer", "Pooling"), [], "not a JSON object"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(folder, kinds, pooling, problem):
    (folder / "modules.json").write_text(json.dumps(modules(*kinds)))
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    with pytest.raises(UnsupportedEmbedderError, match=problem):
        load_embedder(folder)


def test_the_newer_name_of_mean_pooling_is_known(folder):
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode": "mean"}')
    assert load_embedder(folder).dimension == 16


def test_a_default_prompt_is_refused(folder):
    (folder / "config_sentence_transformers.json").write_text('{"default_prompt_name": "query"}')
    with pytest.raises(UnsupportedEmbedderError, match="'query'"):
        load_embedder(folder)


def test_a_module_outside_the_folder_is_refused(folder):
    (folder / "modules.json").write_text(
        json.dumps(modules("Transformer", "Pooling", pooling="../elsewhere"))
    )
    with pytest.raises(UnsupportedEmbedderError, match="outside"):
        load_embedder(folder)


def test_weights_that_can_carry_code_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedEmbedderError, match="safetensors"):
        load_embedder(folder)


@pytest.mark.parametrize("content", [None, "{", '{"a": 1}', "[1]"])
def test_a_broken_list_of_modules_is_refused(folder, content):
    (folder / "modules.json").unlink()
    if content is not None:
        (folder / "modules.json").write_text(content)
    with pytest.raises(UnsupportedEmbedderError, match=r"modules\.json"):
        load_embedder(folder)


def test_a_name_that_is_no_folder_says_what_is_possible():
    with pytest.raises(EmbedderUnavailableError, match="all-MiniLM-L6-v2"):
        load_embedder("an-organisation/a-model")


@pytest.mark.parametrize("tokens", [0, 7, 65, 10_000])
def test_a_length_that_the_model_cannot_read_is_refused(folder, tokens):
    with pytest.raises(ValueError, match="max_tokens"):
        load_embedder(folder, max_tokens=tokens)


def test_the_packaged_model_reads_alike_by_name_and_as_a_folder(embedder):
    texts = ["A man is eating food.", "Time is a river."]
    named = load_embedder("all-minilm-l6-v2")
    assert isinstance(named, MiniLMEmbedder)
    assert named.id == embedder.id
    folder = load_embedder(minilm_folder(), max_tokens=192)
    assert np.array_equal(folder.embed(texts), embedder.embed(texts))


class Counting:
    id, dimension = "counting", 2

    def __init__(self):
        self.seen = []

    def embed(self, texts):
        self.seen += texts
        return np.array([[len(text), 1] for text in texts], dtype=np.float32).reshape(-1, 2)


def test_the_cache_embeds_every_text_once():
    inner = Counting()
    cached = CachedEmbedder(inner)
    first = cached.embed(["x", "yy", "x"])
    assert cached.embed(["yy", "x", "zzz"])[:2].tolist() == first[[1, 0]].tolist()
    assert inner.seen == ["x", "yy", "zzz"]
    assert (cached.id, cached.dimension) == ("counting", 2)
    assert cached.embed([]).shape == (0, 2)


def test_the_cache_forgets_its_oldest_text():
    inner = Counting()
    cached = CachedEmbedder(inner, size=2)
    for text in ("a", "b", "c", "b", "a"):
        assert cached.embed([text]).tolist() == [[1, 1]]
    assert inner.seen == ["a", "b", "c", "a"]
    assert cached.embed(["p", "q", "r"]).shape == (3, 2)
