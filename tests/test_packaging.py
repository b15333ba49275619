"""What an installation without the development tools has must be enough to run."""

import ast
import re
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
OURS = {"service", "workers", "defenses", "analyses", "evaluators", "jobspec"}
# Import names that differ from the distribution's, and parts that a declared one always brings.
DISTRIBUTIONS = {
    "python_multipart": "python-multipart",
    "pydantic_settings": "pydantic-settings",
    "yaml": "pyyaml",
    "huggingface_hub": "huggingface-hub",
    "dp_accounting": "dp-accounting",
    "gymnasium": "rl extra",
    "dattri_llm": "attribution extra",
    "dattri": "attribution extra",
    "lm_eval": "lm-eval extra",
    "starlette": "fastapi",
    "kombu": "celery",
    "psycopg": "postgres extra",
    "sklearn": "dev extra",
}


def imported() -> set[str]:
    """Top-level names that the packages import."""
    names: set[str] = set()
    for package in OURS:
        for path in (REPOSITORY / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Import):
                    names |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names.add(node.module.partition(".")[0])
    return names


def test_every_import_comes_from_a_declared_dependency():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    declared = {re.split(r"[\[<>=]", item)[0] for item in project["dependencies"]}
    foreign = imported() - OURS - set(sys.stdlib_module_names)
    needed = {DISTRIBUTIONS.get(name, name) for name in foreign}
    assert {name for name in needed - declared if not name.endswith(" extra")} == set()


def test_every_dependency_is_pinned_by_the_constraints():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (REPOSITORY / "constraints.txt").read_text("utf-8").splitlines()
    }
    declared = {re.split(r"[\[<>=]", item)[0].lower() for item in project["dependencies"]}
    assert declared <= pinned
