"""Static checks of the deployment files; there is no container engine to try them on."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from service.cli.main import app
from service.settings import Settings

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text("utf-8"))


def test_every_command_of_the_compose_file_exists(compose: dict[str, Any]):
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for service in compose["services"].values():
        program, *arguments = service.get("command", ["postgres"])
        if program == "tunegate":
            assert arguments[0] in commands


def test_every_setting_of_the_compose_file_exists(compose: dict[str, Any]):
    known = {f"TUNEGATE_{name.upper()}" for name in Settings.model_fields}
    assert set(compose["x-tunegate"]["environment"]) <= known


def test_services_wait_for_services_that_exist(compose: dict[str, Any]):
    for service in compose["services"].values():
        assert set(service.get("depends_on", {})) <= set(compose["services"])


def test_no_secret_has_a_default(compose: dict[str, Any]):
    text = (REPOSITORY / "docker-compose.yml").read_text("utf-8")
    for name in ("TUNEGATE_DATABASE_PASSWORD", "TUNEGATE_KEY_PEPPER"):
        assert re.search(rf"\$\{{{name}:\?", text)
        assert f"${{{name}:-" not in text


def test_the_image_copies_what_exists():
    for line in (REPOSITORY / "deploy/Dockerfile").read_text("utf-8").splitlines():
        if line.startswith("COPY"):
            *sources, _ = line.split()[1:]
            assert all((REPOSITORY / source).exists() for source in sources)
