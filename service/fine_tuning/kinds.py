"""The kinds of work that go through the queue, and how a job's log speaks of each."""

from typing import NamedTuple

FINE_TUNE = "fine_tune"
GATE_RUN = "gate_run"
ANALYSIS = "analysis"


class Words(NamedTuple):
    """noun: at the beginning of a sentence. last: what a new attempt goes on from."""

    noun: str
    last: str


_WORDS = {
    FINE_TUNE: Words("Fine-tuning job", "the last checkpoint"),
    GATE_RUN: Words("Gate run", "the last kept answers"),
    ANALYSIS: Words("Analysis", "what is kept of the last one"),
}


def words(kind: str) -> Words:
    """The words for a kind; a kind without words of its own is a job."""
    return _WORDS.get(kind, Words("Job", "what is kept"))
