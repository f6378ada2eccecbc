"""EpisodeTracker alone, in cases that the oracle's streams do not contain: all their goals are different."""

import sys

import numpy as np
import pytest
import torch

from torchrl_her.episodes.tracker import EpisodeTracker
from torchrl_her.episodes.transitions import WrittenTransitions


def written(rows, ids=None, begins=None):
    """Return the transitions of one write, given rows (goal at the root, goal under next, done)."""
    return WrittenTransitions(
        goals=torch.tensor([[float(after)] for _, after, _ in rows]),
        start=np.array([before for before, _, _ in rows], dtype=np.uint8).view("V1"),
        outcome=np.array([after for _, after, _ in rows], dtype=np.uint8).view("V1"),
        done=np.array([done for _, _, done in rows]),
        begins=np.zeros(len(rows), dtype=bool) if begins is None else np.array(begins),
        row_length=1,
        trajectory=None if ids is None else np.array(ids),
        mask=None,
    )


class Tracking:
    """A tracker whose episodes are numbered from 1 on."""

    def __init__(self, capacity=100):
        self.tracker = EpisodeTracker(capacity, patience=capacity - 1)
        self.opened = 0

    def write(self, *rows, ids=None, begins=None):
        """Track a write; return the episodes, the steps, and the goals of the published episodes."""
        transitions = written(rows, ids, begins)
        tracked = self.tracker.track(transitions, transitions.goals, first_episode=self.opened + 1)
        self.opened += tracked.opened
        published = {episode.episode: episode.kept.flatten().tolist() for episode in tracked.episodes}
        return tracked.stamps[:, 0].tolist(), tracked.stamps[:, 1].tolist(), published

    def write_others(self, count, first):
        """Track episodes of one step, one per write; return the published episodes of each write."""
        return [self.write((goal, goal, True), ids=[goal])[2] for goal in range(first, first + count)]


def test_among_lanes_at_the_same_goals_the_one_that_waited_longest_is_continued():
    tracking = Tracking()
    assert tracking.write((1, 5, False), (2, 5, False), begins=[True, True])[0] == [1, 2]
    assert tracking.write((5, 5, False), (5, 7, False), begins=[True, True])[0] == [1, 2]
    assert tracking.write((5, 8, True), (7, 9, True), begins=[True, True]) == (
        [1, 2],
        [2, 2],
        {1: [5.0, 5.0, 8.0], 2: [5.0, 7.0, 9.0]},
    )


def test_an_id_that_is_used_again_after_the_end_begins_an_episode():
    tracking = Tracking()
    assert tracking.write((1, 2, False), (2, 3, True), ids=[4, 4])[0] == [1, 1]
    assert tracking.write((3, 4, False), ids=[4])[:2] == ([2], [0])


@pytest.mark.parametrize("ids", [[0, 0, 0, 0], [2**40, -7, 2**40, -7]], ids=["one id for both", "ids of any value"])
def test_two_lanes_are_distinguished_by_their_goals_and_ids(ids):
    rows = [(1, 2, False), (10, 11, False), (2, 3, True), (11, 12, True)]
    assert Tracking().write(*rows, ids=ids) == ([1, 2, 1, 2], [0, 0, 1, 1], {1: [2.0, 3.0], 2: [11.0, 12.0]})


def test_a_lane_that_waits_longer_than_any_before_is_published_and_can_be_continued():
    tracking = Tracking()
    assert tracking.write((1, 2, False), ids=[0])[2] == {}
    assert tracking.write((10, 11, False), ids=[1])[2] == {1: [2.0]}, "the first lane that waits is idle"
    assert tracking.write((2, 3, False), ids=[0])[2] == {}, "it was continued, so the other one may be, too"
    assert tracking.write((20, 21, False), ids=[2])[2] == {}
    assert tracking.write((21, 22, False), ids=[2])[2] == {2: [11.0]}, "no lane has waited so long"
    assert tracking.write((11, 12, True), ids=[1])[2] == {2: [11.0, 12.0]}, "the idle lane was continued"


def test_a_lane_is_published_once_while_it_is_idle():
    tracking = Tracking()
    tracking.write((1, 2, False), ids=[0])
    assert [1 in episodes for episodes in tracking.write_others(10, first=10)] == [True] + [False] * 9


def after_a_long_pause():
    """Return the tracking of a lane that was continued after a hundred other transitions."""
    tracking = Tracking(capacity=1000)
    tracking.write((1, 2, False), ids=[0])
    tracking.write_others(100, first=10)
    tracking.write((2, 3, True), ids=[0])
    return tracking


def test_a_single_long_pause_does_not_make_other_lanes_wait_as_long():
    tracking = after_a_long_pause()
    tracking.write((201, 202, False), ids=[1])
    published = tracking.write_others(10, first=110)
    assert any(202.0 in goals for episodes in published for goals in episodes.values())


def test_a_loaded_tracker_waits_for_idle_lanes_as_long_as_the_saved_one():
    """A checkpoint without ``longest_wait`` would publish the running lane immediately, and later lanes too early."""
    tracking = after_a_long_pause()
    tracking.write((120, 121, False), ids=[1])
    twin = Tracking(capacity=1000)
    twin.tracker.load_state_dict(tracking.tracker.state_dict())
    twin.opened = tracking.opened
    published = [each.write_others(10, first=130) for each in (tracking, twin)]
    assert published[1] == published[0]
    waited = [[121.0] in episodes.values() for episodes in published[0]].index(True)
    assert waited > 0, "without longest_wait, it is published at the first write"


def test_episodes_are_published_in_the_order_of_writing_whatever_their_ids():
    rows = [(goal, goal + 1, True) for goal in range(0, 100, 10)]
    published = Tracking().write(*rows, ids=[5, 3, 9, 1, 7, 0, 8, 2, 6, 4])[2]
    assert list(published.values()) == [[row[1]] for row in rows]


def test_a_lane_that_nothing_continues_is_closed():
    tracking = Tracking(capacity=10)
    tracking.write((1, 2, False))
    tracking.write_others(9, first=100)
    assert len(tracking.tracker.state_dict()["lanes"]) == 1
    tracking.write((110, 111, True))
    assert tracking.tracker.state_dict()["lanes"] == []
    assert tracking.write((2, 3, False))[:2] == ([12], [0])


def test_a_running_episode_is_published_at_64_steps_and_each_time_it_has_doubled():
    tracking = Tracking(capacity=1000)
    published = [tracking.write((step, step + 1, False), ids=[0])[2] for step in range(200)]
    assert [len(goals) for episodes in published for goals in episodes.values()] == [64, 128]
    assert [len(episode.kept) for episode in tracking.tracker.flush()] == [200]
    assert tracking.tracker.flush() == []


def test_an_episode_that_is_published_twice_in_one_write_is_returned_once():
    tracking = Tracking(capacity=1000)
    tracking.write(*[(step, step + 1, False) for step in range(64)], ids=[0] * 64)
    rows = [(step, step + 1, False) for step in range(64, 130)] + [(200, 201, True)]
    transitions = written(rows, ids=[0] * 67)
    tracked = tracking.tracker.track(transitions, transitions.goals, first_episode=2)
    assert [(each.episode, len(each.kept), each.already_published) for each in tracked.episodes] == [
        (1, 130, 64),
        (2, 1, 0),
    ]


def test_the_work_is_per_run_and_not_per_transition():
    """The number of executed Python lines does not grow with the length of the runs."""
    counts = []
    for steps in (10, 200):
        tracker = EpisodeTracker(1000, patience=999)
        data = written([(step % 256, (step + 1) % 256, False) for step in range(steps)], ids=[0] * steps)
        lines = 0

        def trace(frame, event, argument):
            nonlocal lines
            lines += event == "line" and "torchrl_her/episodes" in frame.f_code.co_filename
            return trace

        sys.settrace(trace)
        tracker.track(data, data.goals, first_episode=1)
        sys.settrace(None)
        counts.append(lines)
    assert abs(counts[1] - counts[0]) < 10  # the longer run is also published
