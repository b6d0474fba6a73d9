"""One planted fault: a few characters of the source that break a rule of the design."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

SOURCE: Final = Path("src/vllm_agent_hint")
"""Where ``Fault.file`` begins, in a checkout."""

TESTS: Final = Path("tests")
"""Where the names of tests begin."""


class DoesNotApplyError(Exception):
    """The source has moved on: the fault's old text is not in it exactly once."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A patch of one file, and who ought to notice.

    Args:
        name: What it does to the plugin, in a few words; names it on the command line.
        breaks: The rule that no longer holds.
        file: Below ``src/vllm_agent_hint``.
        old: Text that stands there exactly once.
        new: What stands there instead.
        tests: Those that ought to see it, cheapest first, as pytest names them below ``tests/``.
        invariant: Which of the nine of design.md, section 9, the rule is; None for another one.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    invariant: int | None = None

    def planted(self, checkout: Path) -> str:
        """The text of the file with the fault in it.

        Raises:
            DoesNotApplyError: Naming the file, and how often the old text is there.
        """
        text = (checkout / SOURCE / self.file).read_text()
        found = text.count(self.old)
        if found != 1:
            raise DoesNotApplyError(
                f"{self.file} holds the old text {found} times, not once; correct the fault "
                f"{self.name!r} in tests/faults/table.py"
            )
        return text.replace(self.old, self.new)

    def plant(self, checkout: Path) -> None:
        """Write the fault into a copy of the checkout."""
        text = self.planted(checkout)
        (checkout / SOURCE / self.file).write_text(text)
