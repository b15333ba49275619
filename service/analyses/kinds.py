"""Kinds of analysis as the gateway sees them: what each takes and costs; no method is imported."""

import logging
import re

from analyses.context import AnalysisError
from analyses.kind import Kind
from analyses.registry import UnknownKindError, find, names
from analyses.run import read_request
from jobspec.frozen import Frozen
from service.analyses.schemas import KindObject
from service.kit.errors import ApiError, invalid_value

logger = logging.getLogger(__name__)

_INDEX = re.compile(r"\.(\d+)(?=\.|$)")


def offered() -> list[KindObject]:
    """All kinds that can be loaded, by name."""
    found = []
    for name in names():
        try:
            found.append(KindObject.model_validate(find(name).describe()))
        except Exception as error:
            # A kind of another package may fail in any way, and must not hide the others.
            logger.error("the analysis %s cannot be loaded", name, exc_info=error)
    return found


def known(name: str, param: str, status: int = 400) -> Kind:
    """The kind. Raises ApiError: `status` for an unknown name, 503 where it cannot be loaded."""
    try:
        return find(name)
    except UnknownKindError as error:
        raise ApiError(status, f"{_sentence(str(error))}.", "unknown_analysis", param) from error
    except Exception as error:
        logger.error("the analysis %s cannot be loaded", name, exc_info=error)
        raise ApiError(
            503,
            f"The analysis {name} cannot be loaded on this server; tell its operator.",
            "analysis_unavailable",
            param,
        ) from error


def checked(kind: Kind, raw: object) -> Frozen:
    """The kind's request. Raises ApiError 400 naming the first wrong field below `input`."""
    try:
        return read_request(kind, raw)
    except AnalysisError as error:
        where = "input" if error.param is None else "input." + _INDEX.sub(r"[\1]", error.param)
        message = str(error).removeprefix(f"{error.param}: ")
        raise invalid_value(
            f"Invalid value for '{where}': {message.rstrip('.')}.", where
        ) from error


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
