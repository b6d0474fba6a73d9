"""Where ``make stores`` has put the vendors' packages."""

from pathlib import Path
from typing import Final

STORES: Final = Path(__file__).resolve().parent.parent / ".venv" / "stores"
MOONCAKE: Final = STORES / "mooncake"
LMCACHE: Final = STORES / "lmcache"
ASCEND: Final = STORES / "ascend"


def mooncake_libraries() -> list[Path]:
    """Folders of shared libraries."""
    return sorted({file.parent for file in (STORES / "libraries").rglob("*.so*")})
