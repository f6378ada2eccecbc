"""Adopting a data set: its goals are copied to the goal table, and its transitions stay where they are."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_her.checks.goal_copies import GoalCopiesCheck
from torchrl_her.episodes.memory import Episodes
from torchrl_her.episodes.write import map_goals
from torchrl_her.goals.table import GoalTable
from torchrl_her.keys import get_entry
from torchrl_her.offline.data_set import DataSet, MissingEntries
from torchrl_her.order import Neighbours
from torchrl_her.relabel import Relabelling


def add_goals(data_set: DataSet, episodes: Episodes, relabelling: Relabelling) -> np.ndarray:
    """Add the goals of a data set to empty episodes; return the stamps of its rows, ``int64 [rows]``."""
    count = data_set.count
    if count > episodes.capacity:
        raise ValueError(
            f"The data set has {count} transitions, but the goal table holds only {episodes.capacity} goals: pass "
            f"capacity={count} to HERTransform."
        )
    stamps, is_empty = np.empty(len(data_set.ends), np.int64), count > 1
    for piece in data_set.pieces():
        written = relabelling.read(piece.data, episodes.goals, None, piece.names)
        written = written._replace(done=piece.ends)
        is_empty = is_empty and not bool(written.goals.any())
        tracked = episodes.append(written)
        assert episodes.table is not None
        relabelling.keep_apart(episodes.table, piece.data, written, tracked.steps)
        relabelling.check_tracked(piece.data, written, tracked)
        stamps[piece.rows] = written.with_padding(tracked.steps.name)
    if is_empty:
        raise ValueError(
            "All achieved goals of the data set are zeros, so relabelling has no effect: check the data set. "
            "MinariExperienceReplay of TorchRL 0.14.1 returns zeros: use load_minari(minari.load_dataset(...))."
        )
    episodes.flush()
    return stamps


class AdoptedData:
    """A data set that a transform has adopted, and the entries that it lacks, which sampling creates.

    Args:
        missing (MissingEntries): the entries that it lacks.
        to_search (TensorDictBase, optional): some of its transitions ``[n]``, which the first sample searches for
            copies of the desired goal.
    """

    def __init__(self, missing: MissingEntries, to_search: TensorDictBase | None = None):
        self.missing = missing
        self._to_search = to_search
        self._has_checked_stamps = False  # whether a sample without desired goals has passed the check

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_to_search": None}  # copies and saved files stay small

    def check_neighbours(self, neighbours: Neighbours, relabelling: Relabelling) -> None:
        """Check the other transforms of the buffer, which were unknown when the data set was adopted."""
        if neighbours.multi_step is not None:
            raise ValueError(
                "MultiStepTransform computes n-step returns when transitions are written, but adopted data is never "
                "written, so all samples would be single steps. Remove it, or write the data set with rb.extend "
                "instead of adopting it."
            )
        if neighbours.movement_priority is not None:
            raise ValueError(
                "MovementPriority sets priorities when transitions are written, but adopted data is never written, so "
                "they would be sampled uniformly. Remove it, or write the data set with rb.extend instead of adopting "
                "it."
            )
        rows, self._to_search = self._to_search, None
        if rows is not None:
            GoalCopiesCheck(relabelling.keys, relabelling.extra_replaced).search(rows, neighbours.after)

    def create(
        self,
        sample: TensorDictBase,
        stored: dict[NestedKey, Any],
        episode: Tensor,
        step: Tensor,
        *,
        table: GoalTable | None,
        relabelling: Relabelling,
        her_ratio: float,
    ) -> Collection[NestedKey]:
        """Add missing desired goals to the entries in ``stored``, and return the keys that may be missing.

        The goal of each transition ``[*batch]`` is its own outcome. Relabelling replaces it.
        """
        keys, goal_fn = relabelling.keys, relabelling.goal_fn
        if not self.missing.goals:
            return (keys.next_reward,) if self.missing.rewards else ()
        check_missing(self.missing, relabelling, her_ratio)  # her_ratio may have changed
        is_cheap = episode.device.type == "cpu" or not self._has_checked_stamps
        if is_cheap and not torch.compiler.is_compiling():
            self._check_stamps(episode, step, table)
        batch = sample.batch_size
        states = get_entry(sample, keys.next_achieved_goal, "achieved_goal")
        outcomes = map_goals(states.reshape(batch.numel(), *states.shape[len(batch) :]), goal_fn).detach()
        stored.update(dict.fromkeys(relabelling.goal_keys, outcomes.view(*batch, *outcomes.shape[1:])))
        return (keys.next_reward,)

    def _check_stamps(self, episode: Tensor, step: Tensor, table: GoalTable | None) -> None:
        """Check that the transitions with these episode ids and steps, ``int64 [n]`` each, were adopted.

        Others would get their own outcomes as goals.
        """
        assert table is not None
        first, last = table.episode_ids
        unknown = ((episode < first) | (episode > last)) & (episode > 0)  # padding has the episode 0
        if bool(unknown.any()):
            raise ValueError(
                "The sample has no desired goals, and contains transitions that this HERTransform has not adopted: "
                "create the storage from the result of adopt(), and save and load storage and transform together."
            )
        self._has_checked_stamps = True


def check_missing(missing: MissingEntries, relabelling: Relabelling, her_ratio: float) -> None:
    """Check that the missing entries of a data set can be created."""
    if missing.goals and her_ratio < 1:
        raise ValueError(
            f"The data set has no desired goals under {relabelling.keys.desired_goal!r}, and with "
            f"her_ratio={her_ratio} some samples would need them: pass their key as "
            "keys=HERKeys(desired_goal=...), or pass her_ratio=1."
        )
    if missing.goals and any("desired" in each.needs for each in relabelling.strategies.values()):
        raise ValueError(
            "The data set has no desired goals, but the strategy PastDesired draws from them: use another strategy."
        )
    if missing.rewards and relabelling.reads_steps and her_ratio < 1:
        raise ValueError(
            "The data set has no rewards, and ReachedReward cannot compute rewards for original goals: pass "
            f"her_ratio=1 (got {her_ratio}), or a reward that reads the goals, such as SparseReward."
        )
