"""The one error of imported evidence."""


class EvidenceError(ValueError):
    """A result file that cannot count as evidence; the message says what is wrong with it."""
