"""Celery messages as files in a folder: kombu's server-less transport, made safe for a full disk.

kombu writes a message in place, and a worker that reads half of one (or the empty file that a full
disk leaves) ends with an unrecoverable error. Here a message appears whole or not at all, and one
that cannot be read is dropped: it was only a wake-up.
"""

import logging
import os
import time
import uuid
from pathlib import Path
from queue import Empty
from typing import Any

from kombu.exceptions import ChannelError
from kombu.transport import TRANSPORT_ALIASES, filesystem
from kombu.utils.json import dumps

logger = logging.getLogger(__name__)

SCHEME = "folder"


class Channel(filesystem.Channel):  # type: ignore[misc]
    """Whole messages only."""

    def _put(self, queue: str, payload: dict[str, Any], **_: Any) -> None:
        """Write aside, then rename. Raises ChannelError, and then leaves nothing."""
        name = f"{time.time_ns():020d}_{uuid.uuid4()}.{queue}.msg"
        target = Path(self.data_folder_out) / name
        draft = target.with_name(f".{name}.part")
        try:
            draft.write_text(dumps(payload), "utf-8")
            os.replace(draft, target)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise ChannelError(f"a message cannot be written ({error.strerror})") from error

    def _get(self, queue: str, **_: Any) -> Any:
        try:
            return super()._get(queue)
        except (ValueError, ChannelError) as error:
            logger.warning("a message that cannot be read was dropped (%s)", type(error).__name__)
            raise Empty from error


class Transport(filesystem.Transport):  # type: ignore[misc]
    """The transport behind `folder://`."""

    Channel = Channel


def register() -> None:
    """Make the scheme known to kombu."""
    TRANSPORT_ALIASES[SCHEME] = f"{__name__}:Transport"
