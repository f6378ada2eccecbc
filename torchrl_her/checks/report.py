"""The report on written and sampled transitions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """Counts of written and sampled transitions, as returned by ``report()`` of a hindsight transform.

    ``print(report)`` shows all numbers. Each process counts the transitions that it writes and samples itself, and the
    report says if others wrote more. In a copy of a transform, the counts of samples start at 0. Unknown numbers are
    None.

    Attributes:
        transform (str): the transform and its settings.
        her_ratio (float): the share of sampled transitions that should be relabelled.
        episodes (int): the number of episodes that have started.
        running (int): the number of episodes that have not ended.
        mean_length (float | None): the mean number of steps of ended episodes.
        min_length (int | None): the number of steps of the shortest ended episode.
        max_length (int | None): the number of steps of the longest ended episode.
        transitions (int): the number of written transitions, without padding.
        discontinuous (float | None): the share of written transitions that do not continue an episode, although no
            episode had ended.
        ambiguous (float | None): the share of written transitions that could continue several running episodes.
        sampled (int): the number of sampled transitions that were counted: all of the first 2,048, then the
            transitions of one sample in 64.
        relabelled (float | None): the share of counted transitions that were relabelled.
        original_reward (float | None): the mean reward of counted transitions with their original goal.
        original_reached (float | None): the share of these transitions that reach their goal; None if unknown, as with
            n-step returns.
        relabelled_reward (float | None): the mean reward of relabelled transitions.
        relabelled_reached (float | None): the share of relabelled transitions that reach their new goal; None if
            unknown.
        table_size (int | None): the number of goals in the goal table.
        capacity (int | None): the number of goals that the goal table can hold.
        left (float | None): of the transitions that ``her_ratio`` selected (with ``sequence_length``, of the
            sequences), the share that was not relabelled because the goals were no longer in the goal table.
        foreign (float | None): of the same transitions, the share that was not relabelled because another transform
            wrote the transition, or because it is padding.
        others_wrote (bool): whether other processes, or an earlier run whose checkpoint was loaded, wrote transitions:
            the goal table has more goals than this process wrote, or this process samples without writing. The numbers
            of episodes and transitions are then those of this process alone.

    Examples:
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from torchrl.envs import GymEnv
        >>> import torchrl_her.envs
        >>> from torchrl_her import EnvReward, HERTransform
        >>> env = GymEnv("torchrl_her/PointReach-v0")
        >>> her = HERTransform(EnvReward(env), capacity=1000)
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), transform=her, batch_size=64)
        >>> _ = rb.extend(env.rollout(50))
        >>> _ = rb.sample()
        >>> report = her.report()
        >>> report.episodes, report.transitions, report.mean_length, report.sampled
        (1, 50, 50.0, 64)
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
    left: float | None = None
    foreign: float | None = None
    others_wrote: bool = False

    def __str__(self) -> str:
        lengths = ""
        if self.mean_length is not None:
            lengths = f"; length {self.mean_length:.1f} on average, {self.min_length:,} to {self.max_length:,}"
        rows = [
            ("episodes", f"{self.episodes:,}, {self.running:,} of them running{lengths}"),
            ("transitions", f"{self.transitions:,}, {_percent(self.discontinuous)} discontinuous"),
            ("", f"{_percent(self.ambiguous)} ambiguous: they could continue several running episodes"),
        ]
        if self.others_wrote:
            others = "other processes or an earlier run wrote more transitions: their episodes are unknown here"
            rows.append(("", others))
        if self.capacity is not None:
            rows.append(("goal table", f"{self.table_size:,} of {self.capacity:,} goals"))
        sampled = f"{self.sampled:,} counted, {_percent(self.relabelled)} relabelled (her_ratio {self.her_ratio:.2g})"
        rows.append(("sampled", sampled))
        if self.capacity is not None:
            left = f"{_percent(self.left)} left the table: their goals are no longer kept"
            foreign = f"{_percent(self.foreign)} foreign: another transform wrote them, or they are padding"
            rows += [("not relabelled", left), ("", foreign)]
        reward = f"{_number(self.original_reward)} original, {_number(self.relabelled_reward)} relabelled"
        reached = f"{_percent(self.original_reached)} original, {_percent(self.relabelled_reached)} relabelled"
        rows += [("mean reward", reward), ("goal reached", reached)]
        return "\n".join([self.transform, *(f"  {name:<16}{text}" for name, text in rows)])


def ratio(part: float, whole: float) -> float | None:
    """Return a share, or None of nothing."""
    return part / whole if whole else None


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
