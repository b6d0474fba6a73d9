"""A real Mooncake master on loopback, where ``make stores`` could fetch it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from tests.stores import MOONCAKE, mooncake_libraries
from vllm_agent_hint.cli.demo.server import free_port

MooncakeMaster: TypeAlias = tuple[dict[str, str], subprocess.Popen[bytes]]

_FIND = "import mooncake.store, mooncake; print(list(mooncake.__path__)[0])"


def mooncake_environment() -> dict[str, str]:
    """What a process needs to import it."""
    added = {}
    if MOONCAKE.exists():
        paths = filter(None, [os.environ.get("PYTHONPATH"), str(MOONCAKE)])
        added["PYTHONPATH"] = os.pathsep.join(paths)
    libraries = mooncake_libraries()
    if libraries:
        added["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, libraries))
    return added


def why_no_mooncake() -> str:
    """Why it can't be run here; empty if it can."""
    environment = {**os.environ, **mooncake_environment()}
    found = subprocess.run(
        [sys.executable, "-c", _FIND], env=environment, capture_output=True, text=True, check=False
    )
    return "" if found.returncode == 0 else "Mooncake is not here: make stores"


@contextmanager
def mooncake_master(folder: Path) -> Iterator[MooncakeMaster]:
    """Starts a master. Gives the environment of servers that use it, and its process."""
    environment = {**os.environ, **mooncake_environment()}
    package = subprocess.check_output([sys.executable, "-c", _FIND], env=environment, text=True)
    port, metrics_port = free_port(), free_port()
    binary = Path(package.strip()) / "mooncake_master"
    binary.chmod(0o755)
    log = (folder / "master.log").open("wb")
    master = subprocess.Popen(
        [
            str(binary),
            *("--rpc_address", "127.0.0.1", "--rpc_port", str(port)),
            *("--metrics_port", str(metrics_port)),
        ],
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    config = folder / "mooncake.json"
    config.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": f"127.0.0.1:{port}",
                "protocol": "tcp",
                "device_name": "",
                "global_segment_size": 128 << 20,
                "local_buffer_size": 64 << 20,
            }
        )
    )
    time.sleep(1.0)
    try:
        yield (
            {
                **mooncake_environment(),
                "MOONCAKE_CONFIG_PATH": str(config),
                "VLLM_HOST_IP": "127.0.0.1",
                "PYTHONHASHSEED": "0",
            },
            master,
        )
    finally:
        master.kill()
        master.wait(10)
        log.close()
