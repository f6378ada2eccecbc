"""Adopting a data set: its goals are copied to the goal table, and its transitions stay where they are."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_her.checks.checks import Checks
from torchrl_her.checks.goal_copies import GoalCopiesCheck
from torchrl_her.episodes.memory import Episodes
from torchrl_her.episodes.write import (
    RowNames,
    Write,
    as_array,
    check_last_dimension,
    check_single_steps,
    get_columns,
    map_goals,
)
from torchrl_her.goals.names import STAMP
from torchrl_her.goals.table import GoalTable
from torchrl_her.keys import HERKeys, get_entry
from torchrl_her.order import Neighbours
from torchrl_her.relabel import GoalMap, Relabelling

PIECE_ROWS = 2**14
PIECE_BYTES = 2**22  # at most this many bytes are copied for each piece
SEARCHED = 64  # this many rows are searched for copies of the desired goal


class MissingEntries(NamedTuple):
    """The entries that are missing in a data set, and that sampling creates."""

    goals: bool = False  # desired goals; rewards and ends are then recomputed even if they are stored
    rewards: bool = False


class Piece(NamedTuple):
    """Consecutive rows of a data set."""

    data: TensorDictBase  # [*piece], with placeholders for missing entries
    rows: slice  # row numbers in the flattened data set
    ends: np.ndarray  # bool [n], the last transitions of episodes; without padding
    names: RowNames


class DataSet:
    """Transitions ``[*batch]`` with time as the last dimension. They are neither copied nor modified.

    An episode ends at a done flag, at the last transition of its trajectory id, and at the end of a row, ``[..., T]``.

    Raises:
        TypeError: if the data set is not a TensorDict.
        ValueError: if the data set is empty, time is not its last dimension, or a reward or flag has no last dimension.
        KeyError: if the data set has no done flags, or an entry has another key.
    """

    def __init__(self, data: TensorDictBase, keys: HERKeys, goal_fn: GoalMap | None):
        check_single_steps(data)
        if not data.batch_dims or not data.batch_size.numel():
            raise ValueError(
                f"The data set has batch size {list(data.batch_size)} and contains no transitions: pass a TensorDict "
                "with batch size [transitions] or [..., time]."
            )
        self.data = data
        self.keys = keys
        self.missing = MissingEntries(
            goals=all(data.get(key, None) is None for key in (keys.desired_goal, keys.next_desired_goal)),
            rewards=data.get(keys.next_reward, None) is None,
        )
        _check_names(data, keys, self.missing)
        for key in (keys.next_reward, *keys.next_flags):
            check_last_dimension(key, data.get(key, None), data.batch_size)
        _check_time_is_last(data, keys)
        columns = get_columns(data, keys)
        # bool [rows], False for padding
        self.mask = as_array(columns["mask"], np.bool_) if "mask" in columns else None
        ids = as_array(columns["trajectory"], np.int64) if "trajectory" in columns else None
        self.ends = self._find_ends(as_array(columns["done"], np.bool_).copy(), ids)
        states = get_entry(data, keys.next_achieved_goal, "achieved_goal")
        self._device = states.device
        state = states[(0,) * data.batch_dims]
        self._zero_goal: Tensor | None = None  # [*goal], a placeholder
        if self.missing.goals:
            self._zero_goal = torch.zeros_like(map_goals(state.unsqueeze(0), goal_fn).detach()[0])
        self._piece_rows = min(PIECE_ROWS, max(1, PIECE_BYTES // max(1, 4 * state.nbytes)))

    @property
    def count(self) -> int:
        """The number of transitions, without padding."""
        return self.data.batch_size.numel() if self.mask is None else int(self.mask.sum())

    def _find_ends(self, ends: np.ndarray, ids: np.ndarray | None) -> np.ndarray:
        """Return which rows are the last of an episode, ``bool [rows]``, given the done flags, which are changed."""
        batch = self.data.batch_size
        rows = np.arange(len(ends)) if self.mask is None else self.mask.nonzero()[0]
        if not len(rows):
            raise ValueError("All rows of the data set are padding, so it has no transitions: check the mask.")
        ends[_last_of_each(rows // batch[-1], rows) if len(batch) > 1 else rows[-1:]] = True
        if ids is not None:
            ends[_last_of_each(ids if self.mask is None else ids[self.mask], rows)] = True
        return ends

    def pieces(self) -> Iterator[Piece]:
        """Yield the data set in pieces, which can begin and end within an episode."""
        for data, first in self._cut(self.data, 0):
            rows = slice(first, first + data.batch_size.numel())
            ends = self.ends[rows] if self.mask is None else self.ends[rows][self.mask[rows]]
            names = RowNames(range(rows.start, rows.stop), self.data.batch_size)
            yield Piece(self._with_placeholders(data), rows, ends, names)

    def _cut(self, rows: TensorDictBase, first: int) -> Iterator[tuple[TensorDictBase, int]]:
        """Cut rows ``[*batch]`` into pieces, and yield each piece with the number of its first row."""
        inner = math.prod(rows.shape[1:])
        if inner > self._piece_rows:
            for number, row in enumerate(rows):
                yield from self._cut(row, first + number * inner)
            return
        several = self._piece_rows // inner
        for begin in range(0, len(rows), several):
            yield rows[begin : begin + several], first + begin * inner

    def _with_placeholders(self, data: TensorDictBase) -> TensorDictBase:
        """Return a piece with placeholders for missing entries. They are expanded, so they take no memory per row."""
        if not any(self.missing):
            return data
        data, batch = data.copy(), data.batch_size
        if self._zero_goal is not None:
            for key in (self.keys.desired_goal, self.keys.next_desired_goal):
                data.set(key, self._zero_goal.expand(*batch, *self._zero_goal.shape))
            if data.get(self.keys.next_terminated, None) is None:
                data.set(
                    self.keys.next_terminated, torch.zeros((), dtype=torch.bool, device=self._device).expand(*batch, 1)
                )
        # NaN never counts as the reward of a reached goal.
        return data.set(self.keys.next_reward, torch.full((), torch.nan, device=self._device).expand(*batch, 1))

    def rows_to_search(self) -> TensorDictBase:
        """Return a copy of some rows, evenly spaced, ``[n]``."""
        count = self.data.batch_size.numel()
        index = np.unravel_index(np.linspace(0, count - 1, min(count, SEARCHED)).astype(int), self.data.batch_size)
        return self.data[tuple(torch.from_numpy(each).to(self._device) for each in index)]

    def with_stamps(self, stamps: np.ndarray) -> TensorDictBase:
        """Return a shallow copy of the data set with the stamps of its rows, ``int64 [rows]``."""
        column = torch.from_numpy(stamps).view(self.data.batch_size)
        # The buffers of an ensemble must have the same device, and most storages set one.
        return self.data.copy().auto_device_().set(STAMP, column.to(self._device))


def _check_names(data: TensorDictBase, keys: HERKeys, missing: MissingEntries) -> None:
    """Check that a missing entry is not stored under another key."""
    for is_missing, key, name in (
        (missing.goals, keys.desired_goal, "desired_goal"),
        (missing.rewards, keys.next_reward, "reward"),
    ):
        leaves = data.keys(include_nested=True, leaves_only=True)
        found = [leaf for leaf in leaves if leaf == name or (isinstance(leaf, tuple) and leaf[-1] == name)]
        if is_missing and found:
            raise KeyError(
                f"The data set has no entry {key!r}, but it has {found[0]!r}: pass this key as "
                f"keys=HERKeys({name}=...), without 'next', or exclude() the entry if it is something else."
            )


def _check_time_is_last(data: TensorDictBase, keys: HERKeys) -> None:
    """Check that transitions ``[*batch]`` continue or end along the last dimension more often than along others."""
    if data.batch_dims < 2:
        return
    first = data[tuple(slice(64) for _ in data.batch_size)]
    states, outcomes = (
        get_entry(first, key, "achieved_goal").reshape(*first.batch_size, -1)
        for key in (keys.achieved_goal, keys.next_achieved_goal)
    )
    done = get_entry(first, keys.next_done, "done").reshape(first.batch_size)

    def share(dim: int) -> float:
        later = first.batch_size[dim] - 1
        if not later:
            return 0.0
        continues = (states.narrow(dim, 1, later) == outcomes.narrow(dim, 0, later)).all(-1)
        return float((continues | done.narrow(dim, 0, later)).float().mean())

    shares = [share(dim) for dim in range(data.batch_dims)]
    if max(shares) > shares[-1]:
        dim = shares.index(max(shares))
        raise ValueError(
            f"The data set has batch size {list(data.batch_size)}, and its transitions continue along dimension "
            f"{dim}, but time must be the last dimension: pass data.transpose({dim}, {data.batch_dims - 1})."
        )


def _last_of_each(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the last row of each distinct value; both arguments are ``int64 [n]``."""
    run_ends = np.append((values[1:] != values[:-1]).nonzero()[0], len(values) - 1)
    _, last = np.unique(values[run_ends][::-1], return_index=True)
    return rows[run_ends[::-1][last]]


def add_goals(data_set: DataSet, episodes: Episodes, relabelling: Relabelling, checks: Checks) -> np.ndarray:
    """Add the goals of a data set to empty episodes; return the stamps of its rows, ``int64 [rows]``."""
    count = data_set.count
    if count > episodes.capacity:
        raise ValueError(
            f"The data set has {count} transitions, but the goal table holds only {episodes.capacity} goals: pass "
            f"capacity={count} to HERTransform."
        )
    stamps, is_empty = np.empty(len(data_set.ends), np.int64), count > 1
    for piece in data_set.pieces():
        written = Write.read(piece.data, relabelling.keys, relabelling.goal_fn, episodes.goals, piece.names)
        checks.on_write(piece.data, written, None)
        written = written._replace(done=piece.ends)
        is_empty = is_empty and not bool(written.goals.any())
        tracked = episodes.append(written)
        assert episodes.table is not None
        if relabelling.apart:
            relabelling.keep_apart(episodes.table, piece.data, written, tracked.steps)
        checks.on_tracked(piece.data, written, tracked)
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
        relabelling (Relabelling): that of the transform.
        to_search (TensorDictBase, optional): some of its transitions ``[n]``, which the first sample searches for
            copies of the desired goal.
    """

    def __init__(self, missing: MissingEntries, relabelling: Relabelling, to_search: TensorDictBase | None = None):
        self.missing = missing
        self._relabelling = relabelling
        self._to_search = to_search
        self._has_checked_stamps = False  # whether a sample without desired goals has passed the check

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_to_search": None}  # copies and saved files stay small

    def check_neighbours(self, neighbours: Neighbours) -> None:
        """Check the other transforms of the buffer, which were unknown when the data set was adopted."""
        for transform in (neighbours.multi_step, neighbours.movement_priority):
            if transform is not None:
                raise ValueError(
                    f"{type(transform).__name__} changes transitions when they are written, but adopted data is never "
                    "written, so it would have no effect. Remove it, or write the data set with rb.extend instead of "
                    "adopting it."
                )
        rows, self._to_search = self._to_search, None
        if rows is not None:
            GoalCopiesCheck(self._relabelling.keys, self._relabelling.extra_replaced).search(rows, neighbours.after)

    def create(
        self,
        sample: TensorDictBase,
        stored: dict[NestedKey, Any],
        episode: Tensor,
        step: Tensor,
        table: GoalTable | None,
        her_ratio: float,
    ) -> Collection[NestedKey]:
        """Add missing desired goals to the entries in ``stored``, and return the keys that may be missing.

        The goal of each transition ``[*batch]`` is its own outcome. Relabelling replaces it.
        """
        relabelling, keys = self._relabelling, self._relabelling.keys
        if not self.missing.goals:
            return (keys.next_reward,) if self.missing.rewards else ()
        check_missing(self.missing, relabelling, her_ratio)  # her_ratio may have changed
        is_cheap = episode.device.type == "cpu" or not self._has_checked_stamps
        if is_cheap and not torch.compiler.is_compiling():
            self._check_stamps(episode, step, table)
        batch = sample.batch_size
        states = get_entry(sample, keys.next_achieved_goal, "achieved_goal")
        states = states.reshape(batch.numel(), *states.shape[len(batch) :])
        outcomes = map_goals(states, relabelling.goal_fn).detach()
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
