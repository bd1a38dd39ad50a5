"""A request that the guard refused is answered with 503: the engine's API has only 400 for a request that failed."""

from __future__ import annotations

from typing import Any

# What the text of such an error begins with; not every version of the API passes an error's code on.
REFUSED = "not enough GPU memory for a prefill chunk"
_RETRY_AFTER = (b"retry-after", b"5")


class Unavailable:
    """ASGI middleware. An answer that is a stream by then carries the error in the stream, as the engine sends it."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        held: dict[str, Any] | None = None

        async def answered(message: dict[str, Any]) -> None:
            nonlocal held
            if message["type"] == "http.response.start" and message["status"] == 400:
                held = message  # until its body says which failure it is
                return
            if held is not None:
                start, held = held, None
                if REFUSED.encode() in message.get("body", b""):
                    start = {**start, "status": 503, "headers": [*start.get("headers", ()), _RETRY_AFTER]}
                await send(start)
            await send(message)

        await self._app(scope, receive, answered)
