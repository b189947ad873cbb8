"""The plan of a schedule's transfers, as text."""

from __future__ import annotations

from course_lib.pipeline import transfers
from course_lib.pipeline.schedules import Schedule


def transfer_plan(schedule: Schedule) -> str:
    """Return a line per rank: its actions, and in parentheses the batches of sends and receives that start between."""
    lines = []
    for rank, actions in enumerate(schedule):
        words = []
        for batches, action in zip(transfers.plan_send_recv(schedule, rank), [*actions, None], strict=True):
            for batch in batches:
                ways = [f"{'send' if t.source == rank else 'recv'} {t.kind}{t.micro_batch}" for t in batch]
                words.append(f"({' '.join(ways)})")
            words += [f"{action.kind}{action.micro_batch}"] if action else []
        lines.append(f"rank {rank}: {' '.join(words)}")
    return "\n".join(lines)
