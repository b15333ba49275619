"""The judge's process, kept alive by the gateway, which itself never imports torch."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from jobspec.judging import JudgeOptions

logger = logging.getLogger(__name__)

ANSWER_BYTES = 16 * 1024 * 1024


class JudgeUnavailable(RuntimeError):
    """There is no judgement now; the message says why, and trying again later may help."""


class JudgeBusy(JudgeUnavailable):
    """As many requests as may wait are waiting."""


class JudgeTimeout(JudgeUnavailable):
    """The judge took too long; its process was ended and the next request starts another."""


class Judged(NamedTuple):
    """Judgements in the order of what was asked, and who gave them: {id, version, threshold}."""

    judge: Mapping[str, Any]
    judgements: Sequence[Mapping[str, Any]]


def judge_command(options: JudgeOptions) -> list[str]:
    return [sys.executable, "-m", "evaluators.harmfulness.serve", options.model_dump_json()]


def judge_environment(
    base: Mapping[str, str], options: JudgeOptions, threads: int | None
) -> dict[str, str]:
    """The gateway's environment without its own settings, which hold its secrets."""
    kept = getattr(options, "api_key_variable", None)
    environment = {
        name: value
        for name, value in base.items()
        if not name.startswith("TUNEGATE_") or name == kept
    }
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


class JudgeProcess:
    """One process that judges, one request at a time; callers may be several threads.

    It is started by the first request and again after it ended. waiting: requests that may be
    under way, the one that is judged included. A start that failed is not tried again for
    `pause_seconds`.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        timeout_seconds: float = 60.0,
        start_seconds: float = 180.0,
        waiting: int = 8,
        pause_seconds: float = 10.0,
    ) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._timeout_seconds = timeout_seconds
        self._start_seconds = start_seconds
        self._pause_seconds = pause_seconds
        self._places = threading.BoundedSemaphore(waiting)
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._judge: Mapping[str, Any] = {}
        self._no_start_before = 0.0
        self._closed = False

    def ask(self, prompts: Sequence[str], responses: Sequence[str]) -> Judged:
        """Judge pairs. Raises JudgeUnavailable, or one of its two more precise kinds."""
        if not self._places.acquire(blocking=False):
            raise JudgeBusy("Too many requests are waiting for the scorer. Try again.")
        try:
            if not self._turn.acquire(timeout=self._timeout_seconds):
                raise JudgeTimeout("The scorer is busy with other requests. Try again.")
            try:
                process = self._running()
                request = {"prompts": list(prompts), "responses": list(responses)}
                answer = self._exchange(process, request, self._timeout_seconds)
                return Judged(self._judge, self._judgements(answer, len(responses)))
            finally:
                self._turn.release()
        finally:
            self._places.release()

    def close(self) -> None:
        """End the process; nobody can ask any more."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._closed:
            raise JudgeUnavailable("The server is shutting down.")
        if self._process is not None and self._process.poll() is None:
            return self._process
        if time.monotonic() < self._no_start_before:
            raise _cannot_start()
        self._end()
        try:
            process = self._start()
            first = self._exchange(process, None, self._start_seconds)
            ready = first.get("ready")
            if not isinstance(ready, dict):
                logger.error("the scorer could not be started: %s", first.get("error"))
                raise _cannot_start()
        except JudgeUnavailable:
            self._no_start_before = time.monotonic() + self._pause_seconds
            self._end()
            raise
        self._judge = ready
        logger.info("the scorer %s runs as process %d", ready.get("id"), process.pid)
        return process

    def _start(self) -> "subprocess.Popen[bytes]":
        try:
            # A session of its own: a Ctrl-C in the gateway's terminal is the gateway's to handle.
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            logger.error("the scorer could not be started: %s", error)
            raise _cannot_start() from error
        return self._process

    def _exchange(
        self, process: "subprocess.Popen[bytes]", request: dict[str, Any] | None, seconds: float
    ) -> dict[str, Any]:
        """Send a line, if there is one, and read one. A process that does not keep the time is
        killed, which ends the writing and the reading here."""
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        line = b""
        try:
            with suppress(BrokenPipeError):
                if request is not None:
                    process.stdin.write(json.dumps(request).encode() + b"\n")
                    process.stdin.flush()
                line = process.stdout.readline(ANSWER_BYTES)
        finally:
            timer.cancel()
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if isinstance(answer, dict):
            return answer
        self._end()
        if late.is_set():
            logger.error("the scorer was ended: no answer within %g s", seconds)
            raise JudgeTimeout(f"The scorer gave no answer within {seconds:g} seconds. Send less.")
        logger.error("the scorer ended by itself (exit code %s)", process.returncode)
        raise JudgeUnavailable("The scorer stopped. It is started again by the next request.")

    def _judgements(self, answer: dict[str, Any], count: int) -> Sequence[Mapping[str, Any]]:
        judgements = answer.get("judgements")
        if isinstance(judgements, list) and len(judgements) == count:
            return judgements
        logger.error("the scorer could not judge: %s", answer.get("error", "no judgements"))
        raise JudgeUnavailable("The scorer could not judge this input.")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def _cannot_start() -> JudgeUnavailable:
    return JudgeUnavailable("The scorer could not be started. The operator's log says why.")


def start_later(options: JudgeOptions, threads: int | None) -> JudgeProcess:
    """The process of these options; the first request starts it."""
    return JudgeProcess(judge_command(options), judge_environment(os.environ, options, threads))
