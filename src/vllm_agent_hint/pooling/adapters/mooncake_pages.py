"""The pages of a manifest as objects of a Mooncake store, beside the KV blocks."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from typing import Any, Final, TypeVar

logger = logging.getLogger("vllm.agent_hint")

_PACKAGE: Final = "mooncake.store"
_BUFFER_BYTES: Final = 32 << 20
"""Of memory for what comes and goes; a longer page can't be written."""
_PATIENCE_SECONDS: Final = 0.5
_SILENCE_SECONDS: Final = 10.0
_NOT_THERE: Final = -704
"""Mooncake's code for an object that it does not have."""

T = TypeVar("T")


class MooncakePages:
    """See ``Pages``. Through a client of its own, which lends the store no memory: the connector
    has one in its workers only, where a scheduler can't ask for anything but KV blocks.

    One thread talks to the store. The scheduler waits for an answer for a bounded time, and once
    it has waited in vain asks nothing for a while: Mooncake needs four seconds to find that its
    master is gone. A page is pinned softly for as long as it is of use, so that it goes after
    blocks that nobody keeps alive.

    Args:
        prefix: Of the keys; deployments that can't exchange blocks have to differ in it.
        open_client: Makes the client, in that thread.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        prefix: str,
        open_client: Callable[[], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefix = prefix
        self._open_client = open_client or _open_client
        self._clock = clock
        self._client: Any = None
        self._silent_until = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agent-hint-mooncake")
        # Opening takes a while: nobody should have to wait for it when the first page is wanted.
        self._thread.submit(self._open)

    def put(self, name: str, page: bytes, seconds: float) -> None:
        """See ``Pages``."""

        def upsert() -> int:
            return int(self._client.upsert(self._key(name), page, _pinned_for(seconds)))

        _check(self._ask(upsert))

    def get(self, name: str) -> bytes:
        """See ``Pages``."""
        return self._ask_soon(lambda: bytes(self._client.get(self._key(name))))

    def holds(self, name: str) -> bool:
        """See ``Pages``."""
        try:
            return self._ask_soon(lambda: bool(self._client.is_exist(self._key(name)) == 1))
        except OSError:
            return False

    def delete(self, name: str) -> None:
        """See ``Pages``. By force: Mooncake lets nobody remove what was read a moment ago."""
        code = self._ask(lambda: int(self._client.remove(self._key(name), True)))
        if code != _NOT_THERE:
            _check(code)

    def _key(self, name: str) -> str:
        return f"{self._prefix}@{name}"

    def _ask(self, call: Callable[[], T]) -> T:
        return self._thread.submit(self._call, call).result()

    def _ask_soon(self, call: Callable[[], T]) -> T:
        if self._clock() < self._silent_until:
            raise TimeoutError("the Mooncake store did not answer")
        try:
            return self._thread.submit(self._call, call).result(_PATIENCE_SECONDS)
        except TimeoutError:
            self._silent_until = self._clock() + _SILENCE_SECONDS
            raise

    def _call(self, call: Callable[[], T]) -> T:
        if self._client is None:
            raise OSError("there is no client for the Mooncake store")
        try:
            return call()
        except Exception as error:
            raise OSError(f"the Mooncake store could not be asked: {error}") from error

    def _open(self) -> None:
        try:
            self._client = self._open_client()
        except Exception:
            logger.exception(
                "vllm-agent-hint: opening a client for Mooncake failed; a prefetch of a session "
                "that has never run here needs a prompt"
            )


def _open_client() -> Any:
    """As vLLM's own worker opens one, by the same configuration.

    Raises:
        Exception: The package, the configuration or the master is not there.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import rdma_utils
    from vllm.distributed.mooncake_store import MooncakeStoreConfig, setup_mooncake_store
    from vllm.utils.network_utils import get_ip

    config = replace(
        MooncakeStoreConfig.load_from_config(),
        mode="standalone-store",
        global_segment_size=0,
        local_buffer_size=_BUFFER_BYTES,
    )
    client = import_module(_PACKAGE).MooncakeDistributedStore()
    setup_mooncake_store(client, config, rdma_utils.get_requester_local_hostname(get_ip()))
    return client


def _pinned_for(seconds: float) -> Any:
    package = import_module(_PACKAGE)
    config = package.ReplicateConfig()
    config.soft_pin_action = package.SoftPinAction.ENABLE
    config.soft_pin_ttl_ms = max(1_000, int(seconds * 1_000))
    return config


def _check(code: int) -> None:
    if code != 0:
        raise OSError(f"the Mooncake store answered {code}")
