"""Whether an answer ends at the expected number, as the fine-tuning papers score GSM8K."""

import math
import re

ANSWER_PHRASE = "The final answer is: "
# How GSM8K's own solutions mark the answer; the papers replace it by the phrase before tuning.
GSM8K_MARK = "####"

_NUMBER = re.compile(r"-?\d+\.?\d*")


def final_number(text: str) -> float | None:
    """The first number after the phrase "The final answer is: ", else the last number at all.

    Commas are removed first, and GSM8K's "####" is read as the phrase. A number is an optional
    minus, digits, and an optional point with digits. Of several phrases the first counts, up to the
    next one; without a number there, the last number of the text. None where there is no finite
    number (the papers' code returns infinity, which equals itself). Source: the papers' public
    evaluation code.
    """
    plain = text.replace(",", "").replace(GSM8K_MARK, ANSWER_PHRASE)
    numbers = _NUMBER.findall(plain)
    if not numbers:
        return None
    segments = plain.split(ANSWER_PHRASE)
    after = _NUMBER.findall(segments[1]) if len(segments) > 1 else []
    number = float(after[0] if after else numbers[-1])
    return number if math.isfinite(number) else None


def has_final_number(label: str) -> bool:
    """Whether a label marks its number in GSM8K's form: mark or phrase, then only the number."""
    plain = label.replace(",", "").replace(GSM8K_MARK, ANSWER_PHRASE)
    _, phrase, rest = plain.rpartition(ANSWER_PHRASE)
    return phrase != "" and _NUMBER.fullmatch(rest.strip().strip("$%").rstrip(".")) is not None


def is_right_number(answer: str, label: str) -> bool:
    """Whether both have a final number and it is the same, compared as floats."""
    expected = final_number(label)
    return expected is not None and final_number(answer) == expected
