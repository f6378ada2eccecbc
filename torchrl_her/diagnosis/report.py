"""What became of written and sampled transitions, as a report that people read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """What hindsight did so far. ``print(report)`` shows it.

    Written transitions are counted in the process that writes them, sampled ones in the process that samples. A copy
    has sampled nothing. A number that is not known is None.

    Attributes:
        transform (str): the transform and its settings.
        her_ratio (float): the share of sampled transitions that should be relabelled.
        episodes (int): episodes that began.
        running (int): episodes that have not ended.
        mean_length (float): the mean number of steps of ended episodes.
        min_length (int): the number of steps of the shortest one.
        max_length (int): the number of steps of the longest one.
        transitions (int): written transitions, without padding.
        discontinuous (float): the share of them that do not continue an episode, although none had ended.
        ambiguous (float): the share of them that could continue several running episodes.
        table_size (int): goals in the goal table.
        capacity (int): the most goals that fit into it.
        sampled (int): sampled transitions that were counted: those of the first samples, then of one in 64.
        relabelled (float): the share of them that were relabelled.
        episode_running (float): of the transitions that should be relabelled, the share that was not because the
            episode had not ended.
        evicted (float): the share that was not because the goals had left the goal table.
        elsewhere (float): the share that was not because another transform wrote the transition, or it is padding.
        original_reward (float): the mean reward of sampled transitions with their original goal.
        original_reached (float): the share of them that reach it.
        relabelled_reward (float): the mean reward of relabelled transitions.
        relabelled_reached (float): the share of them that reach their new goal.
    """

    transform: str
    her_ratio: float
    episodes: int
    running: int
    mean_length: float | None
    min_length: int | None
    max_length: int | None
    transitions: int
    discontinuous: float | None
    ambiguous: float | None
    sampled: int
    relabelled: float | None
    original_reward: float | None
    original_reached: float | None
    relabelled_reward: float | None
    relabelled_reached: float | None
    table_size: int | None = None
    capacity: int | None = None
    episode_running: float | None = None
    evicted: float | None = None
    elsewhere: float | None = None

    def __str__(self) -> str:
        lengths = ""
        if self.mean_length is not None:
            lengths = f"; length {self.mean_length:.1f} on average, {self.min_length:,} to {self.max_length:,}"
        table, reasons = [], []
        if self.capacity is not None:
            table = [("goal table", f"{self.table_size:,} of {self.capacity:,} goals")]
            shares = {"episode running": self.episode_running, "evicted": self.evicted, "elsewhere": self.elsewhere}
            reasons = [("not relabelled", ", ".join(f"{_percent(share)} {name}" for name, share in shares.items()))]
        rows = [
            ("episodes", f"{self.episodes:,}, {self.running:,} of them running{lengths}"),
            (
                "transitions",
                f"{self.transitions:,}, {_percent(self.discontinuous)} discontinuous, "
                f"{_percent(self.ambiguous)} ambiguous",
            ),
            *table,
            ("sampled", f"{self.sampled:,}, {_percent(self.relabelled)} relabelled (her_ratio {self.her_ratio:.2g})"),
            *reasons,
            ("mean reward", f"{_number(self.original_reward)} original, {_number(self.relabelled_reward)} relabelled"),
            (
                "goal reached",
                f"{_percent(self.original_reached)} original, {_percent(self.relabelled_reached)} relabelled",
            ),
        ]
        return "\n".join([self.transform, *(f"  {name:<16}{text}" for name, text in rows)])


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
