"""Cuts written transitions into lanes and episodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_her.episodes.transitions import WrittenTransitions

# A running episode is published from this many steps on, each time that its length has doubled.
FIRST_PUBLICATION = 64


class EpisodeSteps(NamedTuple):
    """The steps of an episode that ended, grew or became idle."""

    episode: int
    kept: Tensor  # [steps, ...], the per-step data from the first step on: achieved goals, or packed transitions
    before: int  # how many of the steps were handed over before


class TrackedTransitions(NamedTuple):
    """The episodes of the transitions of one write, in the order of writing."""

    stamps: np.ndarray  # int64 [n, 2], the episode id of each transition and its step in the episode
    episodes: list[EpisodeSteps]  # at most one entry per episode
    opened: int  # how many episodes began


@dataclass(slots=True)
class Lane:
    """One environment's stream of transitions, and its running episode."""

    episode: int
    trajectory: int | None  # the collector's id
    outcome: bytes = b""  # both goals under "next" in the last transition
    written: int = 0  # the tracker's count of transitions when the lane was last continued
    kept: list[Tensor] = field(default_factory=list)  # pieces [steps, ...], the per-step data of the running episode
    steps: int = 0
    published: int = 0  # how many steps were handed over

    @property
    def key(self) -> tuple[int | None, bytes]:
        """The trajectory id and the last goals, which the next transition of the lane must match."""
        return self.trajectory, self.outcome

    def extend(self, kept: Tensor) -> None:
        """Append further steps."""
        if self.kept and self.kept[0].device != kept.device:  # loaded from another device
            self.kept = [piece.to(kept.device) for piece in self.kept]
        self.kept.append(kept)
        self.steps += len(kept)

    def publish_into(self, episodes: dict[int, EpisodeSteps]) -> None:
        """Hand over all steps so far, if there are new ones."""
        if self.steps == self.published:
            return
        self.kept = [torch.cat(self.kept)]
        earlier = episodes.pop(self.episode, None)  # of the same write
        before = self.published if earlier is None else earlier.before
        episodes[self.episode] = EpisodeSteps(self.episode, self.kept[0], before)
        self.published = self.steps

    @property
    def has_doubled(self) -> bool:
        """Whether a running episode is due to be published."""
        return self.steps >= max(FIRST_PUBLICATION, 2 * self.published)


class EpisodeTracker:
    """Finds the episode and the step of each written transition.

    A run of transitions continues the open lane that has its trajectory id (or also has none) and whose last outcome
    it starts from. If several lanes do, it continues the one that waited longest; if none does, it opens a lane. An
    episode ends with a done flag, after ``max_episode_steps``, or when nothing continues its lane any more.

    A silent reset carries no flag. So a lane counts as idle when it has waited twice as long as any lane that was
    continued ever did, measured in transitions written meanwhile. The steps of an idle lane are handed over.

    Args:
        max_episode_steps (int): the length after which an episode is ended.
        patience (int): the number of transitions written meanwhile after which a waiting lane is closed.
        publish_running (bool): whether the steps of an episode are handed over while it runs: when its length has
            doubled, and when its lane becomes idle. Otherwise they are handed over once, when the episode ends, and a
            waiting lane is closed when it is past ``patience`` and idle. Default: True.
    """

    def __init__(self, max_episode_steps: int, patience: int, *, publish_running: bool = True):
        self.max_episode_steps = max_episode_steps
        self.patience = patience
        self.publish_running = publish_running
        self.written = 0  # transitions so far
        self.longest_wait = 0  # of a lane that was continued, in transitions written to other lanes
        # Open lanes by episode, each dict ordered by how long they have waited. Idle lanes waited longest.
        self._idle: dict[int, Lane] = {}
        self._lanes: dict[int, Lane] = {}
        self._by_key: dict[tuple[int | None, bytes], deque[Lane]] = {}  # all open lanes

    def track(self, written: WrittenTransitions, kept: Tensor, first_episode: int) -> TrackedTransitions:
        """Assign transitions to episodes. The work in Python is per run of transitions, not per transition.

        Args:
            written: the transitions.
            kept: what their lanes keep of them, ``[n, ...]``.
            first_episode: the id of the first episode that begins in this write; the others follow it.
        """
        order, written = _order_by_lane(written)
        if order is not None:
            kept = kept[torch.from_numpy(order).to(kept.device)]
        start, outcome, done, trajectory = written.start, written.outcome, written.done, written.trajectory
        before = self.written
        self.written += len(done)
        stamps = np.empty((len(done), 2), dtype=np.int64)
        episodes: dict[int, EpisodeSteps] = {}
        opened = 0
        for begin, end in _cut_into_runs(written, order):
            of_trajectory = None if trajectory is None else int(trajectory[begin])
            lane = self._take((of_trajectory, start[begin].tobytes()))
            if lane is not None:
                # A long pause says little about the other lanes: it counts for at most twice the longest wait.
                waited = min(before - lane.written, 2 * self.longest_wait + len(done))
                self.longest_wait = max(self.longest_wait, waited)
                if lane.steps >= self.max_episode_steps:  # loaded into a tracker with shorter episodes
                    lane.publish_into(episodes)
                    lane = None
            while begin < end:
                if lane is None:
                    lane = Lane(first_episode + opened, of_trajectory)
                    opened += 1
                cut = min(end, begin + self.max_episode_steps - lane.steps)
                stamps[begin:cut, 0] = lane.episode
                stamps[begin:cut, 1] = np.arange(lane.steps, lane.steps + cut - begin)
                lane.extend(kept[begin:cut].clone())  # the caller may overwrite its tensors
                begin = cut
                if done[cut - 1] or lane.steps == self.max_episode_steps:
                    lane.publish_into(episodes)
                    lane = None
            if lane is not None:
                lane.outcome = outcome[end - 1].tobytes()
                self._leave_open(lane)
                if self.publish_running and lane.has_doubled:
                    lane.publish_into(episodes)
        self._close_waiting_lanes(episodes)
        if order is not None:
            stamps[order] = stamps.copy()
        return TrackedTransitions(stamps, list(episodes.values()), opened)

    def without_lanes(self) -> EpisodeTracker:
        """Return a tracker with the same settings and no open lanes, for another process."""
        return EpisodeTracker(self.max_episode_steps, self.patience, publish_running=self.publish_running)

    def flush(self) -> list[EpisodeSteps]:
        """End the running episodes and hand over their steps."""
        episodes: dict[int, EpisodeSteps] = {}
        for lane in self._open_lanes():
            lane.publish_into(episodes)
        self._clear()
        return list(episodes.values())

    def _take(self, key: tuple[int | None, bytes]) -> Lane | None:
        """Remove the lane with this key that waited longest from the open lanes, and return it."""
        lanes = self._by_key.get(key)
        if lanes is None:
            return None
        lane = lanes.popleft()
        if not lanes:
            del self._by_key[key]
        del (self._lanes if lane.episode in self._lanes else self._idle)[lane.episode]
        return lane

    def _leave_open(self, lane: Lane) -> None:
        lane.written = self.written
        self._lanes[lane.episode] = lane
        self._by_key.setdefault(lane.key, deque()).append(lane)

    def _close_waiting_lanes(self, episodes: dict[int, EpisodeSteps]) -> None:
        """Hand over the steps of lanes that became idle, and close lanes that nothing continued for too long."""
        idle_after = 2 * self.longest_wait
        if self.publish_running:
            for lane in self._waiting(self._lanes, min(idle_after, self.patience)):
                lane.publish_into(episodes)
                self._idle[lane.episode] = self._lanes.pop(lane.episode)
            for lane in self._waiting(self._idle, self.patience):
                self._take(lane.key)  # it is the one with this key that waited longest
        else:
            for lane in self._waiting(self._lanes, max(idle_after, self.patience)):
                lane.publish_into(episodes)
                self._take(lane.key)

    def _waiting(self, lanes: dict[int, Lane], patience: int) -> Iterator[Lane]:
        """Yield each lane that nothing continued for more than ``patience`` transitions; the caller removes it."""
        while lanes:
            lane = next(iter(lanes.values()))
            if self.written - lane.written <= patience:
                break
            yield lane

    @property
    def has_open_lanes(self) -> bool:
        """Whether an episode is running."""
        return bool(self._lanes or self._idle)

    @property
    def open_steps(self) -> int:
        """The number of steps that the open lanes keep."""
        return sum(lane.steps for lane in self._open_lanes())

    def _open_lanes(self) -> Iterator[Lane]:
        return chain(self._idle.values(), self._lanes.values())

    def _clear(self) -> None:
        for lanes in (self._idle, self._lanes, self._by_key):
            lanes.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the open lanes as tensors, numbers and lists."""
        lanes = [
            {
                "episode": lane.episode,
                "trajectory": lane.trajectory,
                "outcome": torch.from_numpy(np.frombuffer(lane.outcome, np.uint8).copy()),
                "written": lane.written,
                "kept": torch.cat(lane.kept),
                "published": lane.published,
            }
            for lane in self._open_lanes()
        ]
        return {"written": self.written, "longest_wait": self.longest_wait, "lanes": lanes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the open lanes by those of `state_dict`."""
        self._clear()
        for saved in state["lanes"]:
            lane = Lane(saved["episode"], saved["trajectory"], saved["outcome"].numpy(force=True).tobytes())
            lane.extend(saved["kept"])
            lane.published = saved["published"]
            self.written = saved["written"]
            self._leave_open(lane)
        self.written, self.longest_wait = state["written"], state["longest_wait"]


def _order_by_lane(written: WrittenTransitions) -> tuple[np.ndarray | None, WrittenTransitions]:
    """Order transitions lane by lane, each lane in time.

    Returns:
        The order, an index ``int64 [n]`` (None if the transitions have it already), and the transitions in this order,
        without their goals and their mask.
    """
    trajectory = written.trajectory
    if trajectory is None or (trajectory[1:] >= trajectory[:-1]).all():
        return None, written
    order = np.argsort(trajectory, kind="stable")
    return order, written._replace(
        goals=written.goals[:0],
        start=written.start[order],
        outcome=written.outcome[order],
        done=written.done[order],
        begins=written.begins[order],
        trajectory=trajectory[order],
        mask=None,
    )


def _cut_into_runs(written: WrittenTransitions, order: np.ndarray | None) -> list[tuple[int, int]]:
    """Cut transitions ``[n]`` where one does not continue the previous one; return the begin and end of each run."""
    trajectory = written.trajectory
    begins = written.begins.copy()
    begins[:1] = True
    if trajectory is not None:
        begins[1:] = trajectory[1:] != trajectory[:-1]
    begins[1:] |= written.done[:-1]
    begins[1:] |= written.start[1:] != written.outcome[:-1]
    first = begins.nonzero()[0].tolist()
    runs = list(zip(first, [*first[1:], len(begins)], strict=False))
    if order is not None:
        # Episodes are published in the order of writing, so that they leave the table as they leave the storage.
        runs.sort(key=lambda run: order[run[0]])
    return runs
