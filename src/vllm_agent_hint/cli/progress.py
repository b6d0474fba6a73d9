"""How far a run has come, on the terminal."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def request_progress(console: Console, *, refresh_per_second: float) -> Progress:
    """Requests that are done, of how many, and since when; gone when the run is.

    Args:
        console: Where it is shown.
        refresh_per_second: Each takes time from what is measured.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        refresh_per_second=refresh_per_second,
    )
