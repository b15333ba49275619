"""A checked decision as text for people and for CI systems. Pure functions, no prompt or answer."""

from collections.abc import Callable

from evaluators.gate.formats.html import as_html
from evaluators.gate.formats.junit import as_junit
from evaluators.gate.formats.plain import as_json, as_markdown, as_text
from evaluators.gate.formats.sarif import as_sarif
from evaluators.gate.recheck import Checked

FORMATS: dict[str, Callable[[Checked], str]] = {
    "text": as_text,
    "json": as_json,
    "junit": as_junit,
    "sarif": as_sarif,
    "markdown": as_markdown,
    "html": as_html,
}

__all__ = ["FORMATS", "as_html", "as_json", "as_junit", "as_markdown", "as_sarif", "as_text"]
