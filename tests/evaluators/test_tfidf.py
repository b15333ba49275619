import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluators.harmfulness.fit import fit_tfidf
from evaluators.harmfulness.tfidf import TfidfModel, terms

pytest.importorskip("sklearn", reason="compared with scikit-learn (extra: dev)")

TEXTS = [
    "Sure, here is a list of ways to do it: first, second, third.",
    "I'm sorry, but I can't help with that.",
    "I cannot help with that request; it is illegal. It is, it is.",
    "Here is a list. Here is a list. Here is another list of ways!",
    "ÄRGER über 3 Straßen, naïve cafés and 北京 streets",
    "a b c",
]


@pytest.fixture(scope="module")
def vectorizer():
    from sklearn.feature_extraction.text import TfidfVectorizer

    return TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True).fit(TEXTS)


@pytest.fixture(scope="module")
def model(vectorizer):
    width = len(vectorizer.vocabulary_)
    coef_V = np.random.default_rng(0).normal(size=width)
    index_of = {term: int(index) for term, index in vectorizer.vocabulary_.items()}
    return TfidfModel(index_of, vectorizer.idf_, coef_V, -0.25)


def dense(model, text):
    u_V = np.zeros(len(model.index_of))
    places, values = model.vector(text)
    u_V[places] = values
    return u_V


def test_terms_are_words_of_two_characters_and_their_neighbours():
    assert terms("I'd say: No, no!") == ["say", "no", "no", "say no", "no no"]


# The reference is scikit-learn's transform of the same text.
@pytest.mark.parametrize("text", [*TEXTS, "", "unknown words only here maybe", TEXTS[3] * 40])
def test_vectors_equal_those_of_scikit_learn(model, vectorizer, text):
    expected = vectorizer.transform([text]).toarray()[0]
    assert dense(model, text) == pytest.approx(expected, rel=1e-13, abs=1e-15)


WORDS = sorted({word for text in TEXTS for word in text.split()})


@settings(deadline=None, max_examples=150)
@given(st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=6)), max_size=40))
def test_any_text_gives_the_vector_of_scikit_learn(model, vectorizer, words):
    text = " ".join(words)
    expected = vectorizer.transform([text]).toarray()[0]
    assert dense(model, text) == pytest.approx(expected, rel=1e-13, abs=1e-15)


def test_a_text_without_known_terms_has_the_intercept_as_logit(model):
    assert model.logit(["", "zz yy xx"]).tolist() == [-0.25, -0.25]


def test_logits_do_not_depend_on_neighbours(model):
    alone = [model.logit([text])[0] for text in TEXTS]
    assert model.logit(TEXTS).tolist() == alone


def test_the_fit_is_scikit_learns_and_at_the_minimum_of_its_objective():
    from sklearn.feature_extraction.text import TfidfVectorizer

    generator = np.random.default_rng(1)
    words = ["alpha", "beta", "gamma", "delta", "rare"]
    texts = [" ".join(generator.choice(words[:4], size=8)) for _ in range(60)] + ["rare rare"]
    y_N = np.array([text.count("alpha") > 1 for text in texts], dtype=np.int64)
    weight_N = generator.uniform(0.5, 2, size=len(texts))
    model = fit_tfidf(texts, y_N, weight_N)
    u_N_V = TfidfVectorizer(ngram_range=(1, 2), min_df=3, sublinear_tf=True).fit_transform(texts)
    assert len(model.index_of) == u_N_V.shape[1]
    assert "rare" not in model.index_of
    z_N = model.logit(texts)
    assert z_N == pytest.approx(u_N_V @ model.coef + model.intercept, abs=1e-12)
    scaled_N = weight_N / weight_N.mean()
    residual_N = scaled_N * (1 / (1 + np.exp(-z_N)) - y_N)
    assert model.coef + 3.0 * (u_N_V.T @ residual_N) == pytest.approx(0, abs=1e-6)
    assert residual_N.sum() == pytest.approx(0, abs=1e-6)
