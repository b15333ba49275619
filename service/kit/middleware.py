"""The outermost layer: request ids, timing, and an answer even when everything else failed."""

import logging
import time

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.kit.errors import ApiError
from service.kit.handlers import internal_error, respond
from service.kit.ids import new_id

logger = logging.getLogger(__name__)

API_VERSION = "2020-10-01"


class RequestContext:
    """Pure ASGI: adds the answer headers that OpenAI's clients know, and wraps stray exceptions.

    An endpoint tells its organisation through `request.state.organization_id`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.monotonic()
        state = scope.setdefault("state", {})
        request_id = state["request_id"] = new_id("req")
        answered = False

        async def send_with_headers(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["openai-processing-ms"] = str(round(1000 * (time.monotonic() - started)))
                headers["openai-version"] = API_VERSION
                if "organization_id" in state:
                    headers["openai-organization"] = state["organization_id"]
            await send(message)

        if "\0" in scope["path"] or b"%00" in scope["query_string"]:
            refusal = respond(ApiError(400, "The URL contains a NUL character.", "invalid_value"))
            await refusal(scope, receive, send_with_headers)
            return
        try:
            await self.app(scope, receive, send_with_headers)
        except ClientDisconnect:
            logger.info("%s: the client went away", request_id)
        except Exception as error:
            logger.error("%s: %s", request_id, type(error).__name__, exc_info=error)
            if answered:
                raise
            await respond(internal_error())(scope, receive, send_with_headers)
