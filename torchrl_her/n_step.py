"""Returns of several steps under a new goal, and the windows that ``MultiStepTransform`` makes of what is written."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs import MultiStepTransform

from torchrl_her.episodes.transitions import WrittenTransitions
from torchrl_her.goals.table import GoalTable
from torchrl_her.keys import HERKeys
from torchrl_her.relabel import _with_goal_fn, where
from torchrl_her.rewards.goal_reward import GoalReward

# What MultiStepTransform writes besides the reward: how many steps a window has, gamma to that power, whether they
# are several, and the reward of the first.
STEPS = "steps_to_next_obs"
GAMMA = "gamma"
SEVERAL = "nonterminal"
FIRST_REWARD = ("next", "original_reward")
# Where the flags of a window's last step stand: bool [*batch, flags].
LAST_FLAGS = ("next", "hindsight_flags")


class NStepReturn:
    """The return of windows of several steps, as ``MultiStepTransform`` makes them, under a new goal.

    The reward module is asked for each outcome in the window. Where it says that one ends the episode, the sum
    stops there. A window also gets the flags of its last step: ``MultiStepTransform`` leaves those of its first,
    and a loss would bootstrap through an end.

    Args:
        reward (TensorDictModuleBase): the reward module, which may read nothing but goals.
        keys (HERKeys): where the entries stand.

    Raises:
        ValueError: if the reward module reads more, or goals that the table does not hold.
    """

    def __init__(self, reward: TensorDictModuleBase, keys: HERKeys, has_goal_fn: bool):
        check_reads_goals_alone(reward, {keys.next_achieved, keys.desired, keys.next_desired}, has_goal_fn)
        if isinstance(reward, GoalReward):
            reward = _with_goal_fn(reward, None)  # the goals of the table are mapped already
        self.reward = reward
        self.keys = keys
        self.tells_ends = keys.terminated in reward.out_keys

    def replaced(self, tensordict: TensorDictBase) -> list[NestedKey]:
        """Return the entries that are set."""
        written = [key for key in (GAMMA, SEVERAL, FIRST_REWARD) if tensordict.get(key, None) is not None]
        return [self.keys.reward, STEPS, *written, *flag_keys(tensordict, self.keys)]

    def outcomes(
        self, table: GoalTable, episode: Tensor, step: Tensor, steps: Tensor, longest: int
    ) -> tuple[Tensor, Tensor]:
        """Return what the steps of windows ``[batch]`` achieved, and which windows are in the table as a whole.

        Args:
            table: the goal table.
            episode: the ids of the windows' episodes.
            step: their first steps in them.
            steps: how many steps they have.
            longest: the most steps that any has.

        Returns:
            Goals ``[batch, longest, *goal]``, the last one of each window repeated, and ``bool [batch]``.
        """
        start, length = table.find(episode)
        ahead = torch.arange(longest, device=step.device).expand(len(step), -1)
        ahead = torch.minimum(ahead, steps.unsqueeze(1) - 1)  # [batch, longest]
        rows = (start + step).unsqueeze(1) + ahead
        goals, owners = table.read(rows.flatten())
        whole = (owners.view_as(rows) == episode.unsqueeze(1)).all(1) & table.start_at(episode, start)
        whole &= step + steps <= length  # behind an episode that fills the table comes its own start
        return goals.view(*rows.shape, *table.goal_shape), whole

    def recompute(
        self,
        tensordict: TensorDictBase,
        relabelled: Tensor,
        stored: dict[NestedKey, Tensor],
        outcomes: Tensor,
        gamma: float,
    ) -> None:
        """Set the returns of relabelled windows, ``bool [*batch, 1]``, and where they end; others get their flags.

        Args:
            tensordict: the sampled batch, with the new goals.
            relabelled: which of its windows have one.
            stored: the entries of `replaced`, as stored.
            outcomes: ``[n, longest, *goal]``, from `outcomes`, with the batch dimensions flattened to one.
            gamma: the discount.
        """
        steps = stored[STEPS].reshape(-1, 1)  # [n, 1]
        rewards, ends = self._evaluate(tensordict.get(self.keys.desired), outcomes)
        ahead = torch.arange(rewards.shape[1], device=steps.device)
        counts = (ahead < steps) & (ends.cumsum(1) - ends.long() == 0)  # up to the first end, and with it
        discounts = gamma ** ahead.double()
        taken = counts.sum(1, keepdim=True)  # [n, 1]
        new = {
            self.keys.reward: torch.where(counts, rewards * discounts, 0).sum(1, keepdim=True),
            FIRST_REWARD: rewards[:, :1],
            STEPS: taken,
            GAMMA: gamma ** taken.double(),
            SEVERAL: taken > 1,
        }
        flags = tensordict.get(LAST_FLAGS).reshape(len(steps), -1).split(1, dim=1)
        last = dict(zip(flag_keys(stored, self.keys), flags, strict=True))
        new |= last
        if self.keys.truncated in last:
            new[self.keys.truncated] = last[self.keys.truncated] & (taken == steps)
        if self.tells_ends:
            new[self.keys.terminated] = ends.any(1, keepdim=True)
            new[self.keys.done] = new[self.keys.terminated] | new.get(self.keys.truncated, False)
        for key, value in stored.items():
            if key in new:
                kept = last[key].view_as(value) if key in last else value
                tensordict.set(key, where(relabelled, new[key], kept))

    def _evaluate(self, desired: Tensor, outcomes: Tensor) -> tuple[Tensor, Tensor]:
        """Ask the reward module for each outcome: rewards ``float64 [n, longest]``, and which end the episode."""
        shape, goal_shape = outcomes.shape[:2], outcomes.shape[2:]
        desired = desired.reshape(-1, 1, *goal_shape).expand_as(outcomes).flatten(0, 1)
        steps = TensorDict(batch_size=[shape.numel()], device=outcomes.device)
        for key, goals in (
            (self.keys.next_achieved, outcomes.flatten(0, 1)),
            (self.keys.desired, desired),
            (self.keys.next_desired, desired),
        ):
            steps.set(key, goals)
        with torch.no_grad():
            steps = self.reward(steps)
        rewards = steps.get(self.keys.reward).reshape(shape).double()
        if not self.tells_ends:
            return rewards, torch.zeros_like(rewards, dtype=torch.bool)
        return rewards, steps.get(self.keys.terminated).reshape(shape).bool()


class Columns(NamedTuple):
    """WrittenTransitions transitions ``[rows, steps]``, as their windows will be made."""

    start: np.ndarray  # void, the goals that a transition starts from
    outcome: np.ndarray  # void, those that it leads to
    trajectory: np.ndarray  # int64
    done: np.ndarray  # bool

    @classmethod
    def of(cls, written: WrittenTransitions, rows: int) -> Columns:
        """Lay the transitions of one write out in rows."""
        ids = np.zeros(len(written.done), np.int64) if written.trajectory is None else written.trajectory
        return cls(*(column.reshape(rows, -1) for column in (written.start, written.outcome, ids, written.done)))

    def follow(self, before: Columns | None) -> np.ndarray:
        """Say which transitions go on where their row stood, or after an end: ``bool [rows, steps]``."""
        columns = (self.outcome, self.trajectory, self.done)
        first = columns if before is None else before[1:]
        stood, was_in, ended = (
            np.concatenate((one[:, -1:], other[:, :-1]), axis=1) for one, other in zip(first, columns, strict=True)
        )
        follow = (self.start == stood) & (self.trajectory == was_in) | ended
        if before is None:
            follow[:, 0] = True
        return follow


class Windows:
    """What ``MultiStepTransform`` holds back, row by row, and what may come next.

    Attributes:
        may_begin_anew (bool): whether a write may leave what is held back behind: in a process that has just begun
            to write, after ``flush`` and after loading.
    """

    def __init__(self) -> None:
        self.may_begin_anew = True
        self._rows = torch.Size()
        self._last: Columns | None = None

    def follow(self, written: WrittenTransitions, batch: torch.Size, multi_step: MultiStepTransform) -> None:
        """Check that each row of ``[*rows, steps]`` transitions goes on where it stopped, or after an end.

        Raises:
            ValueError: if a window would mix episodes.
        """
        rows = batch[:-1]
        columns = Columns.of(written, rows.numel())
        last = self._last
        if self.may_begin_anew and not (last and rows == self._rows and columns.follow(last)[:, 0].all()):
            last = None
        if last is not None:
            check_same_rows(rows, self._rows)
        check_one_lane_per_row(columns.follow(last))
        if last is None:
            forget_held_back(multi_step)
        self._rows, self._last, self.may_begin_anew = rows, columns, False


def forget_held_back(multi_step: MultiStepTransform) -> None:
    """Forget the last transitions, which wait for their windows, before others come that would be joined to them."""
    multi_step._buffer = None  # TorchRL has no public way


def keep_flags(tensordict: TensorDictBase, keys: HERKeys) -> None:
    """Write each step's flags once more, where ``MultiStepTransform`` takes them from a window's last step."""
    flags = [tensordict.get(key).reshape(*tensordict.batch_size, 1) for key in flag_keys(tensordict, keys)]
    tensordict.set(LAST_FLAGS, torch.cat(flags, dim=-1))


def flag_keys(tensordict: TensorDictBase | dict[NestedKey, Tensor], keys: HERKeys) -> list[NestedKey]:
    """Return where the flags stand that there are."""
    return [key for key in (keys.done, keys.terminated, keys.truncated) if tensordict.get(key, None) is not None]


def check_entries(multi_step: MultiStepTransform, keys: HERKeys) -> None:
    """Check that ``MultiStepTransform`` and HERTransform mean the same reward and the same flag.

    Raises:
        ValueError: if they do not.
    """
    summed = [unravel_key(("next", key)) for key in multi_step.reward_keys]
    check_n_step_entries(summed, keys.reward, unravel_key(("next", multi_step.done_key)), keys.done)


def check_reads_goals_alone(reward: TensorDictModuleBase, goals: set[NestedKey], has_goal_fn: bool) -> None:
    """Check that a reward module can be asked for the steps inside of a window, of which the goals are kept."""
    others = [key for key in reward.in_keys if key not in goals]
    if others:
        raise ValueError(
            f"With MultiStepTransform, the reward of each step in a window is computed from its goals, which are all "
            f"that is kept of it, and {type(reward).__name__} reads {others} too. Pass a reward of the goals, "
            "GoalReward(reward_fn), or leave MultiStepTransform out."
        )
    if has_goal_fn and not isinstance(reward, GoalReward):
        raise ValueError(
            f"With MultiStepTransform, the reward of each step in a window is computed from goals that goal_fn has "
            f"mapped, and {type(reward).__name__} reads them as they were before: pass GoalReward(reward_fn)."
        )


def check_n_step_entries(summed: list[NestedKey], reward: NestedKey, ends: NestedKey, done: NestedKey) -> None:
    """Check that n-step transform and HERTransform mean the same reward and the same flag."""
    if summed != [reward] or ends != done:
        raise ValueError(
            f"MultiStepTransform sums {summed} up to {ends!r}, HERTransform computes {reward!r} and reads {done!r}: "
            "pass both the same reward key, one alone, and the same done key."
        )


def check_n_step_rows(mask: NestedKey | None, dimensions: int) -> None:
    """Check that written transitions are rows in time, without padding."""
    if mask is not None:
        raise ValueError(
            f"MultiStepTransform would sum over the padding that mask_key={mask!r} marks: collect with "
            "split_trajs=False, or leave MultiStepTransform out."
        )
    if dimensions == 0:
        raise ValueError(
            "MultiStepTransform needs a dimension of time, and a single transition was added without one: use extend."
        )


def check_has_multi_step(n_step_return: NStepReturn | None) -> NStepReturn:
    """Check that n-step transitions are sampled where the returns under a new goal are known."""
    if n_step_return is None:
        raise ValueError(
            "The sampled transitions span several steps ('steps_to_next_obs'), and no MultiStepTransform is listed "
            "before HERTransform: make the buffer as it was when they were written."
        )
    return n_step_return


def check_same_rows(rows: torch.Size, before: torch.Size | None) -> None:
    """Check that a write has the same rows as the one before."""
    if before is not None and rows != before:
        raise ValueError(
            f"This write has {rows.numel()} row(s), {list(rows)}, and the one before had {before.numel()}, "
            f"{list(before)}: MultiStepTransform makes its windows along the rows, so each environment needs its own. "
            "Extend with [environments, steps], always the same."
        )


def check_one_lane_per_row(continues: np.ndarray) -> None:
    """Check that each row goes on with the environment that it held; ``bool [rows, steps]``."""
    if not continues.all():
        row = int(np.argwhere(~continues)[0][0])
        raise ValueError(
            f"Row {row} of this write has transitions that do not follow each other, with no done flag between them: "
            "windows of MultiStepTransform would mix episodes. Extend with [environments, steps] and ndim=2 in the "
            "storage, not flattened, from environments that advance together, and reset them when they are done. Once "
            "they go on elsewhere (a write was refused or lost, say), call flush() of HERTransform first."
        )
