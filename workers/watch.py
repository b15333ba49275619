"""The loop around a running training process."""

import logging
import threading
import time

from service.fine_tuning.attempts import Fenced
from workers.child import Child, Message
from workers.outcome import Ask
from workers.pulse import DATABASE_AWAY, Pulse
from workers.recorder import Recorder

logger = logging.getLogger("tunegate.worker")

LOOP_SECONDS = 0.2
# After its result a process has nothing to do but to leave.
LEAVE_SECONDS = 60.0


class Watch:
    """Follows one process: takes its events, carries out what is asked of it."""

    def __init__(
        self,
        child: Child,
        pulse: Pulse,
        recorder: Recorder,
        stopping: threading.Event,
        grace_seconds: float,
    ) -> None:
        self._child = child
        self._pulse = pulse
        self._recorder = recorder
        self._stopping = stopping
        self._grace_seconds = grace_seconds
        self._kill_at: float | None = None
        self.asked: Ask | None = None
        self.result: Message | None = None
        self.failure: Message | None = None

    def follow(self, time_limit_seconds: float) -> None:
        """Return when the process has ended."""
        deadline = time.monotonic() + time_limit_seconds
        while not self._child.exited():
            self.take_events(LOOP_SECONDS)
            self._flush()
            asked = self._wish(deadline)
            if asked is not None and asked is not self.asked:
                self._ask(asked)
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                self._child.kill()

    def take_events(self, wait_seconds: float) -> None:
        """Move arrived events to the recorder; keep the two that end an attempt."""
        events = self._child.take(wait_seconds)
        for event in events:
            if event["event"] == "result":
                self.result = event
                self._kill_at = time.monotonic() + LEAVE_SECONDS
            elif event["event"] == "failure":
                self.failure = event
        self._recorder.add(events)

    def _flush(self) -> None:
        try:
            self._recorder.flush()
        except Fenced:
            self._pulse.fenced.set()
        except DATABASE_AWAY as error:
            # Training goes on; the events are kept and written when the database is back.
            logger.warning("events wait for the database (%s)", type(error).__name__)

    def _wish(self, deadline: float) -> Ask | None:
        """The most urgent reason to stop. A cancel overrides what was asked before it."""
        control = self._pulse.control
        if self._pulse.fenced.is_set():
            return Ask.FENCED
        if control.cancel:
            return Ask.CANCEL
        if self.asked is not None:
            return self.asked
        if time.monotonic() > deadline:
            return Ask.TIME_LIMIT
        if control.pause:
            return Ask.PAUSE
        if self._stopping.is_set():
            return Ask.SHUTDOWN
        return None

    def _ask(self, asked: Ask) -> None:
        first = self.asked is None
        self.asked = asked
        if asked is Ask.FENCED:
            self._child.kill()
        elif first:
            self._child.terminate()
            self._kill_at = time.monotonic() + self._grace_seconds
