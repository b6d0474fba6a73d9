"""The demo's server, left standing for the examples and for curl."""

import os
import sys
from pathlib import Path

from vllm_agent_hint.cli.demo.model import ensure_model
from vllm_agent_hint.cli.demo.server import serve_arguments, server_environment
from vllm_agent_hint.cli.demo.settings import DemoSettings


def become_demo_server(out: Path, port: int) -> None:
    """Replace this process by ``vllm serve`` on loopback: the demo's model, its small pool.

    Args:
        out: Folder for the model and vLLM's cache.
        port: Where to listen.
    """
    settings = DemoSettings.for_cpu()
    model = ensure_model(settings.model, out / "models")
    arguments = serve_arguments(
        model,
        port,
        [
            *("--max-model-len", str(settings.max_model_len)),
            *("--num-gpu-blocks-override", str(settings.small_pool_blocks)),
        ],
    )
    environment = {**os.environ, **server_environment(out / "vllm-cache", on_gpu=False)}
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *arguments]
    os.execve(sys.executable, command, environment)
