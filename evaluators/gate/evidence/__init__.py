"""Result files of other tools as metrics `evidence.<tool>.<name>`, for rules of a policy.

Every value is a share of failed tests, 0 at best. Nothing that a file does not say counts as
passed: a file that is cut off, empty or of an unknown kind is an error, and a test without a
verdict leaves its metric undefined or widens its interval.
"""

from evaluators.gate.evidence.errors import EvidenceError
from evaluators.gate.evidence.files import MAX_BYTES, MAXIMUM_OPEN, read_evidence

__all__ = ["MAXIMUM_OPEN", "MAX_BYTES", "EvidenceError", "read_evidence"]
