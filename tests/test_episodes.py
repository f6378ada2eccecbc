"""EpisodeTracker alone: what the oracle's streams, whose goals are all different, do not show."""

import sys

import numpy as np
import torch

from torchrl_her.episodes.tracker import EpisodeTracker
from torchrl_her.episodes.transitions import WrittenTransitions


def written(rows, ids=None, begins=None):
    """Transitions of one write: (goal at the root, goal under next, done)."""
    count = len(rows)
    return WrittenTransitions(
        goals=torch.tensor([[float(after)] for _, after, _ in rows]),
        start=np.array([before for before, _, _ in rows], dtype=np.uint8).view("V1"),
        outcome=np.array([after for _, after, _ in rows], dtype=np.uint8).view("V1"),
        done=np.array([done for _, _, done in rows]),
        begins=np.zeros(count, dtype=bool) if begins is None else np.array(begins),
        trajectory=None if ids is None else np.array(ids),
    )


def track(tracker, opened, *args, **kwargs):
    """Track a write; ``opened`` counts the episodes."""
    tracked = tracker.track(written(*args, **kwargs), first_episode=len(opened) + 1)
    opened.extend(range(tracked.opened))
    published = {p.episode: p.goals.flatten().tolist() for p in tracked.publications}
    return tracked.stamps[:, 0].tolist(), tracked.stamps[:, 1].tolist(), published


def test_of_lanes_that_stand_at_the_same_goals_the_one_that_waited_longest_is_continued():
    tracker, opened = EpisodeTracker(capacity=100), []
    apart = {"begins": [True, True]}
    assert track(tracker, opened, [(1, 5, False), (2, 5, False)], **apart)[0] == [1, 2]
    assert track(tracker, opened, [(5, 5, False), (5, 7, False)], **apart)[0] == [1, 2]
    assert track(tracker, opened, [(5, 8, True), (7, 9, True)], **apart) == (
        [1, 2],
        [2, 2],
        {1: [5.0, 5.0, 8.0], 2: [5.0, 7.0, 9.0]},
    )


def test_an_id_that_is_used_again_after_the_end_begins_an_episode():
    tracker, opened = EpisodeTracker(capacity=100), []
    assert track(tracker, opened, [(1, 2, False), (2, 3, True)], ids=[4, 4])[0] == [1, 1]
    assert track(tracker, opened, [(3, 4, False)], ids=[4])[:2] == ([2], [0])


def test_two_lanes_that_share_an_id_are_told_apart_by_their_goals():
    tracker, opened = EpisodeTracker(capacity=100), []
    rows = [(1, 2, False), (10, 11, False), (2, 3, True), (11, 12, True)]
    assert track(tracker, opened, rows, ids=[0, 0, 0, 0]) == (
        [1, 2, 1, 2],
        [0, 0, 1, 1],
        {1: [2.0, 3.0], 2: [11.0, 12.0]},
    )


def test_a_lane_that_waits_longer_than_any_did_is_published_and_can_go_on():
    tracker, opened = EpisodeTracker(capacity=100), []
    assert track(tracker, opened, [(1, 2, False)], ids=[0])[2] == {}
    assert track(tracker, opened, [(10, 11, False)], ids=[1])[2] == {1: [2.0]}, "the first lane to wait is idle"
    assert track(tracker, opened, [(2, 3, False)], ids=[0])[2] == {}, "it went on, so the other one may, too"
    assert track(tracker, opened, [(20, 21, False)], ids=[2])[2] == {}
    assert track(tracker, opened, [(21, 22, False)], ids=[2])[2] == {2: [11.0]}, "nothing ever waited so long"
    assert track(tracker, opened, [(11, 12, True)], ids=[1])[2] == {2: [11.0, 12.0]}, "but this one went on"


def test_a_lane_is_published_once_while_it_is_idle():
    tracker, opened = EpisodeTracker(capacity=100), []
    track(tracker, opened, [(1, 2, False)], ids=[0])
    published = [track(tracker, opened, [(goal, goal, True)], ids=[goal])[2] for goal in range(10, 20)]
    assert [1 in episodes for episodes in published] == [True] + [False] * 9


def test_one_lane_that_was_paused_for_long_does_not_make_the_others_wait_as_long():
    tracker, opened = EpisodeTracker(capacity=1000), []
    track(tracker, opened, [(1, 2, False)], ids=[0])
    for goal in range(10, 110):
        track(tracker, opened, [(goal, goal, True)], ids=[goal])
    track(tracker, opened, [(2, 3, True)], ids=[0])  # after a hundred others
    track(tracker, opened, [(201, 202, False)], ids=[1])
    published = [track(tracker, opened, [(goal, goal, True)], ids=[goal])[2] for goal in range(110, 120)]
    assert any(202.0 in goals for episodes in published for goals in episodes.values())


def test_ids_of_any_value_and_in_any_order_work():
    tracker, opened = EpisodeTracker(capacity=100), []
    rows = [(1, 2, False), (20, 21, False), (2, 3, True), (21, 22, True)]
    assert track(tracker, opened, rows, ids=[2**40, -7, 2**40, -7]) == (
        [1, 2, 1, 2],
        [0, 0, 1, 1],
        {1: [2.0, 3.0], 2: [21.0, 22.0]},
    )


def test_episodes_are_published_in_the_order_of_writing_whatever_their_ids():
    rows = [(goal, goal + 1, True) for goal in range(0, 100, 10)]
    tracked = EpisodeTracker(capacity=100).track(written(rows, ids=[5, 3, 9, 1, 7, 0, 8, 2, 6, 4]), first_episode=1)
    assert [float(publication.goals) for publication in tracked.publications] == [row[1] for row in rows]


def test_a_lane_that_nothing_continues_is_forgotten():
    tracker, opened = EpisodeTracker(capacity=10), []
    track(tracker, opened, [(1, 2, False)])
    for goal in range(100, 109):
        track(tracker, opened, [(goal, goal, True)])
    assert len(tracker.state_dict()["lanes"]) == 1
    track(tracker, opened, [(110, 111, True)])
    assert tracker.state_dict()["lanes"] == []
    assert track(tracker, opened, [(2, 3, False)])[:2] == ([12], [0])


def test_a_running_episode_is_published_at_64_steps_and_each_time_it_has_doubled():
    tracker, opened = EpisodeTracker(capacity=1000), []
    seen = []
    for step in range(200):
        _, _, published = track(tracker, opened, [(step, step + 1, False)], ids=[0])
        seen += [len(goals) for goals in published.values()]
    assert seen == [64, 128]
    assert [len(publication.goals) for publication in tracker.flush()] == [200]
    assert tracker.flush() == []


def test_an_episode_that_is_published_twice_in_one_write_is_handed_over_once():
    tracker, opened = EpisodeTracker(capacity=1000), []
    track(tracker, opened, [(step, step + 1, False) for step in range(64)], ids=[0] * 64)
    rows = [(step, step + 1, False) for step in range(64, 130)] + [(200, 201, True)]
    tracked = tracker.track(written(rows, ids=[0] * 67), first_episode=2)
    assert [(p.episode, len(p.goals), p.before) for p in tracked.publications] == [(1, 130, 64), (2, 1, 0)]


def test_the_work_is_per_run_and_not_per_transition():
    """The lines of Python that run do not grow with the length of the runs."""
    counts = []
    for steps in (10, 200):
        tracker = EpisodeTracker(capacity=1000)
        data = written([(step % 256, (step + 1) % 256, False) for step in range(steps)], ids=[0] * steps)
        lines = 0

        def trace(frame, event, argument):
            nonlocal lines
            lines += event == "line" and frame.f_code.co_filename.endswith("tracker.py")
            return trace

        sys.settrace(trace)
        tracker.track(data, first_episode=1)
        sys.settrace(None)
        counts.append(lines)
    assert abs(counts[1] - counts[0]) < 10  # the longer one is published as well
