"""A real LMCache server on loopback, where ``make stores`` could fetch it."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.stores import LMCACHE
from vllm_agent_hint.cli.demo.server import free_port

_FIND = "import lmcache.integration.vllm.lmcache_mp_connector, lmcache.v1.multiprocess.server"
_SITE_CUSTOMIZE = """
# LMCache imports numba, and with numba imported early vLLM's CPU platform falls over llvmlite:
# what it takes for a mapping has no get() with a default.
import llvmlite.binding.ffi as ffi
ffi._lib_fn_wrapper.get = lambda self, key, default=None: default
"""


def lmcache_environment(folder: Path) -> dict[str, str]:
    """What a process needs to import it.

    Args:
        folder: Of the test's own.
    """
    (folder / "sitecustomize.py").write_text(_SITE_CUSTOMIZE)
    paths = [str(folder), str(LMCACHE), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "LMCACHE_TRACK_USAGE": "false",
        "PYTHONHASHSEED": "0",
    }


def why_no_lmcache(folder: Path) -> str:
    """Why it can't be run here; empty if it can."""
    found = subprocess.run(
        [sys.executable, "-c", _FIND],
        env={**os.environ, **lmcache_environment(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if found.returncode == 0 else "LMCache is not here: make stores"


@contextmanager
def lmcache_server(
    folder: Path, *, chunk_size: int = 128
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Starts a server. Gives its port, and its process.

    Args:
        folder: For its log.
        chunk_size: Tokens that are saved together.
    """
    port = free_port()
    log = (folder / "lmcache.log").open("wb")
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "lmcache.v1.multiprocess.server"),
            *("--host", "127.0.0.1", "--port", str(port), "--chunk-size", str(chunk_size)),
            *("--l1-size-gb", "1", "--l1-init-size-gb", "1", "--eviction-policy", "LRU"),
            *("--disable-metrics", "--supported-transfer-mode", "auto"),
        ],
        env={**os.environ, **lmcache_environment(folder)},
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        _wait_until_it_listens(port, server)
        yield port, server
    finally:
        server.kill()
        server.wait(10)
        log.close()


def _wait_until_it_listens(port: int, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 60
    while True:
        assert server.poll() is None, "the LMCache server has ended"
        assert time.monotonic() < until, "the LMCache server does not listen"
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
