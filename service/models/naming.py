"""Names of tuned models, in OpenAI's form."""

import re

from service.kit.ids import random_text


def model_name(base: str, organization: str, suffix: str | None) -> str:
    """`ft:{base}:{organization}:{suffix or empty}:{8 characters}`; both colons stay.

    The organization's name is reduced to letters, digits and dashes, so that the parts of the
    name can be told apart.
    """
    owner = re.sub(r"[^A-Za-z0-9]+", "-", organization).strip("-").lower() or "organization"
    return f"ft:{base}:{owner[:63]}:{suffix or ''}:{random_text(8)}"
