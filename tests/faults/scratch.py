"""Copies of the checkout in which a fault may be planted; the checkout itself is never written."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

_COPIED: Final = ("src", "tests", "pyproject.toml", "README.md")
_LINKED: Final = (".venv", "out")
"""Too large to copy, and not changed by a fault: the environment, models and vLLM's cache."""


@contextmanager
def scratch_copy(checkout: Path) -> Iterator[Path]:
    """A copy of what git knows, or would add, of source and tests."""
    with TemporaryDirectory(prefix="agent-hint-fault-") as folder:
        copy = Path(folder)
        for name in _listed(checkout):
            source, target = checkout / name, copy / name
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        (checkout / "out").mkdir(exist_ok=True)
        for name in _LINKED:
            (copy / name).symlink_to(checkout / name, target_is_directory=True)
        yield copy


def _listed(checkout: Path) -> Sequence[str]:
    order = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *_COPIED]
    listed = subprocess.run(order, cwd=checkout, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name]


def environment_of(copy: Path) -> dict[str, str]:
    """The environment in which Python, and all that it starts, imports the copy."""
    return {
        **os.environ,
        "PYTHONPATH": str(copy / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        # The first example that fails will do.
        "HYPOTHESIS_PROFILE": "no-shrink",
    }


def check_is_imported(copy: Path) -> None:
    """Make sure that tests in a copy test the copy.

    Raises:
        RuntimeError: They would test something else, in which there is no fault.
    """
    asked = "import vllm_agent_hint; print(vllm_agent_hint.__file__)"
    order = [sys.executable, "-c", asked]
    environment = environment_of(copy)
    said = subprocess.run(
        order, cwd=copy, env=environment, capture_output=True, text=True, check=True
    )
    found = Path(said.stdout.strip()).resolve()
    if not found.is_relative_to(copy.resolve()):
        raise RuntimeError(f"a copy imports {found}, so that no fault would be seen")
