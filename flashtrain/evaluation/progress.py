"""The bar that an evaluation shows while it scores."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


def tokens_bar(console: Console) -> Progress:
    """A bar of tasks that count tokens; it goes when it is done."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
