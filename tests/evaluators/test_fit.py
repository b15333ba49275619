import json
from importlib import resources

import numpy as np
import pytest
from safetensors.numpy import load

from evaluators.harmfulness.fit import FitDataMissingError, fit, fit_logistic, harmful_set
from evaluators.harmfulness.scorer import CARD_FILE, WEIGHTS_FILE

sklearn = pytest.importorskip("sklearn", reason="the fit needs scikit-learn (extra: dev)")


@pytest.fixture(scope="module")
def packaged():
    folder = resources.files("evaluators.harmfulness") / "weights"
    card = json.loads((folder / CARD_FILE).read_text(encoding="utf-8"))
    return load((folder / WEIGHTS_FILE).read_bytes()), card


@pytest.fixture(scope="module")
def refitted(shared_data, embedder):
    """Embeds about 5,000 responses: minutes on one core."""
    return fit(shared_data, embedder)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_refit_gives_the_packaged_coefficients(packaged, refitted):
    tensors, _ = packaged
    again, _ = refitted
    assert set(again) == set(tensors)
    for name, values in tensors.items():
        assert again[name] == pytest.approx(values, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_refit_gives_the_packaged_card(packaged, refitted):
    _, card = packaged
    _, again = refitted
    assert again["data_sha256"] == card["data_sha256"]
    assert again["recipe"] == card["recipe"]
    for name, numbers in card["held_out"]["leave_one_source_out"].items():
        found = again["held_out"]["leave_one_source_out"][name]
        assert found == pytest.approx(numbers, abs=0.002), name


def test_held_out_quality_is_as_reported_for_embedding_and_rules(packaged):
    # The reference figures come from an independent fit of the same recipe on the same files.
    # JAILJUDGE: .898 in an early version of this part, .944 with a word-count part beside it.
    _, card = packaged
    assert card["held_out"]["other_sources"]["TESTONLY_jailjudge_mini"]["auroc"] > 0.898 - 0.02
    # With the word-count part: XSTest .988, JailbreakBench .884, PyRIT .715.
    sources = card["held_out"]["leave_one_source_out"]
    assert sources["xstest_completions"]["auroc"] == pytest.approx(0.988, abs=0.02)
    assert sources["jailbreakbench_artifacts"]["auroc"] == pytest.approx(0.884, abs=0.02)
    assert sources["pyrit_scorer_evals"]["auroc"] == pytest.approx(0.715, abs=0.045)
    # Refusal features, one answering model left out: .985.
    refusal = card["held_out"]["refusal_leave_one_model_out"]
    assert refusal["auroc"] == pytest.approx(0.985, abs=0.01)


# Shares of harmful answers that the data's own description states.
@pytest.mark.parametrize(
    ("name", "n", "share"),
    [
        ("jailbreakbench_artifacts", 1518, 0.580),
        ("xstest_completions", 971, 0.117),
        ("pyrit_scorer_evals", 1290, 0.507),
    ],
)
def test_sources_have_their_stated_size_and_balance(shared_data, name, n, share):
    data = harmful_set(shared_data / "labelled_safety", name)
    assert len(data.labels) == n
    assert data.labels.mean() == pytest.approx(share, abs=5e-4)


def test_the_fit_is_at_the_minimum_of_its_stated_objective():
    generator = np.random.default_rng(0)
    x_N_F = generator.normal(size=(200, 3)) * [1, 5, 0.1] + 2
    y_N = (x_N_F[:, 0] + generator.normal(size=200) > 2).astype(int)
    weight_N = generator.uniform(0.5, 2, size=200)
    model = fit_logistic(x_N_F, y_N, weight_N)
    p_N = model.probability(x_N_F)
    z_N_F = (x_N_F - x_N_F.mean(0)) / x_N_F.std(0)
    scaled_N = weight_N / weight_N.mean()
    gradient_F = model.coef + 0.003 * z_N_F.T @ (scaled_N * (p_N - y_N))
    assert gradient_F == pytest.approx(np.zeros(3), abs=1e-8)
    assert float(scaled_N @ (p_N - y_N)) == pytest.approx(0, abs=1e-6)


def test_missing_data_is_named(tmp_path):
    with pytest.raises(FitDataMissingError, match="jailbreakbench_artifacts"):
        harmful_set(tmp_path, "jailbreakbench_artifacts")
