"""How answers to open questions are sampled: the paper's two settings."""

from typing import Literal

from evaluators.generation import Decoding

Setting = Literal["A", "B"]

# Artificial Hivemind, arXiv 2510.22954: A is the default, B seeks diversity. One user turn, no
# system turn. Their order of application is that of evaluators.generation.generate: temperature,
# top_p, min_p.
SETTINGS: dict[Setting, dict[str, float]] = {
    "A": {"temperature": 1.0, "top_p": 0.9, "min_p": 0.0},
    "B": {"temperature": 2.0, "top_p": 1.0, "min_p": 0.1},
}
PAPER_SAMPLES = 50
PAPER_NEW_TOKENS = 2048


def open_ended_decoding(
    setting: Setting = "A",
    *,
    n_samples: int = PAPER_SAMPLES,
    max_new_tokens: int = PAPER_NEW_TOKENS,
) -> Decoding:
    """The decoding of a setting. Longer answers are more similar to each other, so only results of
    equal `max_new_tokens` and `n_samples` can be compared."""
    return Decoding.model_validate(
        {**SETTINGS[setting], "n_samples": n_samples, "max_new_tokens": max_new_tokens}
    )
