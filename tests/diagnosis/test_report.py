"""The numbers of a report agree with counts in plain Python."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import Compose, MultiStepTransform

from support.walks import THRESHOLD, still, walks
from torchrl_her import HERTransform, HindsightAugmentation, SparseReward


def buffer_with(transform, storage=None):
    return TensorDictReplayBuffer(storage=storage or LazyTensorStorage(2000), transform=transform, batch_size=100)


def make(**options):
    return buffer_with(HERTransform(SparseReward(THRESHOLD), **({"capacity": 2000} | options)))


def test_episodes_are_counted():
    rb = make()
    data = walks(10, ends_on_success=True)
    ends = (data["next", "done"].flatten().nonzero()[:, 0] + 1).tolist()
    lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    with pytest.warns(UserWarning, match="terminated_fn"):
        rb.extend(data)
    rb.extend(walks(1, seed=1)[:7])
    report = rb.transform[0].report()
    assert (report.episodes, report.running, report.transitions) == (11, 1, len(data) + 7)
    assert report.mean_length == sum(lengths) / 10
    assert (report.min_length, report.max_length) == (min(lengths), max(lengths))
    assert (report.table_size, report.capacity) == (len(data), 2000)
    assert report.discontinuous == 0


def test_transitions_that_continue_nothing_are_counted():
    rb = make()
    rb.extend(
        walks(2)[::2]
    )  # none of the 25 transitions continues another; only the first of each episode may start one
    assert rb.transform[0].report().discontinuous == pytest.approx(23 / 25, abs=0.05)


@pytest.mark.parametrize("her_ratio", [0.0, 0.5, 1.0])
def test_samples_are_counted(her_ratio):
    rb = make(her_ratio=her_ratio)
    rb.extend(walks(10))
    samples = torch.cat([rb.sample() for _ in range(20)])  # all of these samples are counted
    relabelled = samples["hindsight", "relabelled"]
    reward = samples["next", "reward"]
    report = rb.transform[0].report()
    assert report.sampled == 2000
    assert report.relabelled == pytest.approx(relabelled.float().mean().item())
    for group, mean, share in (
        (~relabelled, report.original_reward, report.original_reached),
        (relabelled, report.relabelled_reward, report.relabelled_reached),
    ):
        if not group.any():
            assert (mean, share) == (None, None)
            continue
        assert mean == pytest.approx(reward[group].mean().item())
        assert share == pytest.approx((reward[group] == 0).float().mean().item())
    if her_ratio:
        assert (report.episode_running, report.evicted, report.elsewhere) == (0, 0, 0)


def test_the_reasons_for_transitions_that_are_not_relabelled_are_distinguished():
    other, rb = make(), make(capacity=500, her_ratio=1.0, strategy="final")
    other.extend(walks(2))
    rb.extend(walks(24, seed=1))  # 600 transitions; the goals of the first 100 are evicted
    rb.extend(walks(1, steps=180, seed=3)[:60])  # a running episode
    rb.storage[torch.arange(100, 150)] = other.storage[torch.arange(50)]
    expected = {"elsewhere": 50, "evicted": 100, "episode_running": 60}
    assert int((~rb[:]["hindsight", "relabelled"]).sum()) == sum(expected.values())
    report = rb.transform[0].report()
    assert {name: getattr(report, name) for name in expected} == pytest.approx(
        {name: count / 660 for name, count in expected.items()}
    )


def test_the_share_of_reached_goals_is_unknown_if_their_reward_varies():
    def reward(achieved, desired):
        return (achieved - desired).norm(dim=-1).neg() - achieved[:, 0].abs()

    data = walks(4)
    data["next", "reward"] = reward(data["next", "achieved_goal"], data["desired_goal"])[:, None]
    rb = buffer_with(HERTransform(reward, capacity=1000))
    rb.extend(data)
    rb.sample()
    assert rb.transform[0].report().original_reached is None
    assert "goal reached    unknown original" in str(rb.transform[0].report())


def test_the_share_of_reached_goals_counts_the_samples_since_their_reward_is_known():
    rb = make()
    data = walks(4)
    data["next", "achieved_goal"][0] = data["desired_goal"][0]
    data["achieved_goal"][1], data["next", "reward"][0] = data["desired_goal"][0], 0.0
    rb.extend(data[:1])  # another goal would be needed to see whether it can be missed
    rb.sample()
    assert rb.transform[0].report().original_reached is None
    rb.extend(data[1:])
    kept = rb.sample()
    kept = kept[~kept["hindsight", "relabelled"][:, 0]]
    assert rb.transform[0].report().original_reached == (kept["next", "reward"] == 0).double().mean().item()


def grid(episodes, steps=25):
    """Return transitions on a grid of 200 cells per dimension."""
    data = walks(episodes, steps)
    for key in ("achieved_goal", "desired_goal"):
        for place in (data, data["next"]):
            place[key] = (place[key] * 100).round() / 100
    return data


@pytest.mark.parametrize("size", [1, 25, 1000])
@pytest.mark.parametrize(
    ("threshold", "data", "is_small"),
    [
        (1e-6, walks, True),
        (1e-6, functools.partial(still, period=5), True),
        (THRESHOLD, walks, False),
        (THRESHOLD / 10, walks, False),
        (1e-6, still, False),
        (0.0, grid, False),
    ],
)
def test_a_threshold_that_is_far_smaller_than_a_step_of_the_goal_is_reported(threshold, data, is_small, size):
    rb, data = buffer_with(HERTransform(SparseReward(threshold), capacity=2000)), data(20)
    data["next", "reward"] = SparseReward(threshold)(data.clone())["next", "reward"]
    for chunk in data.split(size):
        rb.extend(chunk)
    report = rb.transform[0].report()
    assert ("threshold       may be too small" in str(report)) == is_small == (report.step_length is not None)
    if is_small:
        steps = (data["next", "achieved_goal"] - data["achieved_goal"]).norm(dim=-1)
        assert steps[steps > 0].quantile(0.2) < report.step_length < steps[steps > 0].quantile(0.8)


def test_returns_of_several_steps_are_averaged():
    hindsight = HERTransform(SparseReward(THRESHOLD), capacity=1000)
    rb = buffer_with(Compose(MultiStepTransform(3, 0.9), hindsight))
    rb.extend(walks(10))
    batch = rb.sample()
    kept = ~batch["hindsight", "relabelled"]
    assert hindsight.report().original_reward == pytest.approx(batch["next", "reward"][kept].mean().item())
    assert hindsight.report().original_reached is None


def test_written_copies_are_reported():
    rb = buffer_with(HindsightAugmentation(SparseReward(THRESHOLD), n_sampled_goal=3))
    rb.extend(walks(10))
    rb.extend(walks(1, seed=1)[:5])
    batch = torch.cat([rb.sample() for _ in range(3)])
    report = rb.transform[0].report()
    assert (report.episodes, report.running, report.transitions) == (11, 1, 255)
    assert report.relabelled == pytest.approx(batch["hindsight", "relabelled"].float().mean().item())
    assert (report.her_ratio, report.capacity, report.evicted) == (0.75, None, None)
    assert "HindsightAugmentation(SparseReward" in str(report)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
def test_a_copy_counts_its_own_samples(how):
    rb = make()
    rb.extend(walks(4))
    rb.sample()
    copied = how(rb)
    assert copied.transform[0].report().sampled == 0
    copied.sample()
    assert copied.transform[0].report().sampled == rb.transform[0].report().sampled == 100


def test_a_report_before_the_first_write_is_empty():
    report = HERTransform(SparseReward(THRESHOLD), capacity=10).report()
    assert (report.episodes, report.sampled, report.relabelled, report.capacity) == (0, 0, None, None)
    assert "0, unknown relabelled" in str(report)


def test_few_of_many_samples_are_counted():
    rb = make()
    rb.extend(walks(10))
    for _ in range(640):
        rb.sample()
    assert (
        rb.transform[0].report().sampled == 21 * 100 + 10 * 100
    )  # all of the first 2,048 transitions, then one sample in 64


def test_a_sample_that_is_captured_in_a_cuda_graph_is_not_counted(monkeypatch):
    rb = make()
    rb.extend(walks(10))
    with monkeypatch.context() as patch:
        patch.setattr("torchrl_her.diagnosis.diagnosis.is_capturing", lambda values: True)
        patch.setattr("torchrl_her.diagnosis.sample_counts.AsyncCopy", None)  # a copy to the host cannot be captured
        patch.setattr("torchrl_her.diagnosis.replaced_flags.AsyncCopy", None)
        rb.sample()
    assert rb.transform[0].report().sampled == 0
    assert rb.sample().numel() == rb.transform[0].report().sampled
