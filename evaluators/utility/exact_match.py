"""Share of answers that equal the expected text."""

import unicodedata


def is_exact_match(answer: str, label: str) -> bool:
    """Whether both are one text, up to Unicode composition and the width of blanks.

    Case and punctuation count. An empty label matches nothing.
    """
    expected = _plain(label)
    return expected != "" and _plain(answer) == expected


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())
