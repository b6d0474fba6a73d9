"""Reads a capture from a server: the other end of ``frontend.capture_routes``. Standard library
only, so that it runs wherever the plugin does."""

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Final, Self

_PATH: Final = "/v1/agent_hint/capture"
_TIMEOUT_SECONDS: Final = 60.0


class CaptureError(RuntimeError):
    """The server does not record, or has stopped to; says why and what cures it."""


class CaptureReader:
    """A capture that runs from entering the context to leaving it.

    Args:
        url: Of the server, such as ``http://127.0.0.1:8000``.
        api_key: Where the server has one.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url.rstrip("/") + _PATH
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A server is reached as it stands: the way to a loopback address leads past no proxy.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._capture_id = ""
        self.block_size = 0

    def __enter__(self) -> Self:
        started = self._call("POST")
        self._capture_id, self.block_size = started["capture_id"], started["block_size"]
        return self

    def __exit__(self, *_: object) -> None:
        """A server that can't be reached any more ends the capture by itself in a minute."""
        try:
            self._call("DELETE")
        except CaptureError:
            return

    def take(self) -> dict[str, Any]:
        """The next part, a ``CapturePart``.

        Raises:
            CaptureError: There is none.
        """
        return self._call("GET")

    def _call(self, method: str) -> dict[str, Any]:
        query = urllib.parse.urlencode({"capture_id": self._capture_id} if self._capture_id else {})
        request = urllib.request.Request(
            f"{self._url}?{query}" if query else self._url, method=method, headers=self._headers
        )
        try:
            with self._opener.open(request, timeout=_TIMEOUT_SECONDS) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            raise CaptureError(_reason(error)) from None
        except (OSError, ValueError) as error:
            raise CaptureError(f"{self._url} can't be reached ({error})") from None


def _reason(error: urllib.error.HTTPError) -> str:
    if error.code == 401:
        return "the server wants its API key; pass --api-key or set VLLM_API_KEY"
    try:
        said = json.load(error)["error"]["message"]
    except Exception:
        said = "it has no such route; is vllm-agent-hint installed beside it, and active?"
    return f"the server answers {error.code}: {said}"
