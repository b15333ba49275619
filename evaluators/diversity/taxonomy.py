"""The 6 + 17 kinds of open questions, and metrics by kind."""

from collections.abc import Mapping, Sequence

# Leaf -> (top level, percent of the mined questions that carry it; a question has 2.6 on average).
# Artificial Hivemind, arXiv 2510.22954, section 2.
LEAVES: Mapping[str, tuple[str, float]] = {
    "Creative Content Generation": ("Creative Content Generation", 58.0),
    "Brainstorm & Ideation": ("Brainstorm & Ideation", 15.2),
    "Philosophical Questions": ("Open-Endedness", 3.5),
    "Abstract Conceptual Questions": ("Open-Endedness", 10.0),
    "Ambiguous Everyday Questions": ("Open-Endedness", 2.6),
    "Analytical & Interpretive Questions": ("Open-Endedness", 22.6),
    "Speculative & Hypothetical Scenarios": ("Open-Endedness", 22.2),
    "Value-Laden Questions": ("Alternative Perspectives", 2.3),
    "Controversial Questions": ("Alternative Perspectives", 2.5),
    "Communication Styles": ("Alternative Styles", 3.2),
    "Writing Genres": ("Alternative Styles", 38.5),
    "Problem Solving": ("Information-Seeking", 19.3),
    "Decision Support": ("Information-Seeking", 2.2),
    "Skill Development": ("Information-Seeking", 23.5),
    "Recommendations": ("Information-Seeking", 11.0),
    "Concept Explanations": ("Information-Seeking", 23.6),
    "Personal Advice": ("Information-Seeking", 4.1),
}
TOP_LEVELS: tuple[str, ...] = tuple(dict.fromkeys(top for top, _ in LEAVES.values()))


class UnknownLeafError(ValueError):
    """A label that is no leaf of the taxonomy; the message lists those that are."""


def top_of(leaf: str) -> str:
    """The top level of a leaf. Raises UnknownLeafError."""
    if leaf not in LEAVES:
        raise UnknownLeafError(f"{leaf!r} is no leaf of the taxonomy: {', '.join(LEAVES)}")
    return LEAVES[leaf][0]


def members(labels: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """{top level or leaf: query ids}, in the taxonomy's order, for {query id: leaves}.

    A query with several leaves belongs to each of them, and once to each of their top levels. Two
    top levels are leaves themselves. Kinds without a query are left out. Raises UnknownLeafError.
    """
    found: dict[str, list[str]] = {name: [] for name in (*TOP_LEVELS, *LEAVES)}
    for query_id, leaves in labels.items():
        for name in dict.fromkeys([*map(top_of, leaves), *leaves]):
            found[name].append(query_id)
    return {name: queries for name, queries in found.items() if queries}
