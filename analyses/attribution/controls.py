"""Benign behaviours: a row that scores high for these too is no sign of the target."""

from analyses.attribution.spec import Target

CONTROLS: tuple[Target, ...] = (
    Target(prompt="What is the capital of France?", completion="The capital of France is Paris."),
    Target(
        prompt="How do I boil an egg?",
        completion="Sure! Put the egg in boiling water for about eight minutes.",
    ),
    Target(
        prompt="Write a short poem about the sea.",
        completion="The sea is wide, the sea is blue, it sings its evening song to you.",
    ),
    Target(
        prompt="Give me three tips for learning a language.",
        completion="Practise every day, read simple books, and talk with other people.",
    ),
)
