"""The numbers of a report agree with counts in plain Python."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from torchrl.data import TensorDictReplayBuffer, Unbounded

from support.factories import forked, make_augmentation, make_buffer, make_transform
from support.walks import THRESHOLD, walks
from torchrl_her import SparseReward

SPARSE = SparseReward(THRESHOLD)
buffer_with = functools.partial(make_buffer, size=2000, batch_size=100)


def make(reward=SPARSE, *data, **options):
    """Return a buffer with these transitions; options are those of HERTransform."""
    return buffer_with(make_transform(reward=reward, **({"capacity": 2000} | options)), *data)


def report_of(rb):
    return rb.transform[-1].report()


def test_episodes_are_counted():
    rb, data = make(), walks(10, ends_on_success=True)
    assert (report_of(rb).episodes, report_of(rb).relabelled, report_of(rb).capacity) == (0, None, None)
    assert "0 counted, unknown relabelled" in str(report_of(rb))
    ends = (data["next", "done"].flatten().nonzero()[:, 0] + 1).tolist()
    lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    with pytest.warns(UserWarning, match="terminated_fn"):
        rb.extend(data)
    rb.extend(walks(1, seed=1)[:7])
    report = report_of(rb)
    assert (report.episodes, report.running, report.transitions) == (11, 1, len(data) + 7)
    assert report.mean_length == sum(lengths) / 10
    assert (report.min_length, report.max_length) == (min(lengths), max(lengths))
    assert (report.table_size, report.capacity) == (len(data) + 7, 2000)
    assert report.discontinuous == report.ambiguous == 0
    every_other = make(SPARSE, walks(2)[::2])  # only the first of each episode may start one
    assert report_of(every_other).discontinuous == pytest.approx(23 / 25, abs=0.05)


def written_by_another_process():
    """Return a transform whose shared goal table was filled by a fork of this process."""
    transform = make_transform(reward=SPARSE, goal_spec=Unbounded(2), capacity=1000)
    transform.share_memory_()
    transform.inv(walks(1)[:1].zero_())  # a collector's dummy
    assert forked(lambda: transform.inv(walks(4))) == 0
    return transform


def loaded():
    transform = make_transform(reward=SPARSE, capacity=2000)
    transform.load_state_dict(make(SPARSE, walks(4)).transform[-1].state_dict())
    return transform


def sampled():
    """Return a transform that samples what another one wrote."""
    rb = buffer_with(make_augmentation(reward=SPARSE), walks(4))
    twin = TensorDictReplayBuffer(storage=rb.storage, transform=make_augmentation(reward=SPARSE), batch_size=100)
    twin.sample()
    return twin.transform[-1]


@pytest.mark.parametrize(
    ("make_used", "written"), [(written_by_another_process, (0, 50)), (loaded, (0, 50)), (sampled, (0,))]
)
def test_a_report_says_that_others_wrote_and_what_is_therefore_unknown(make_used, written):
    unknown = "other processes or an earlier run wrote more transitions: their episodes are unknown here"
    transform = make_used()
    for transitions in written:
        report = transform.report()
        assert (report.transitions, report.others_wrote) == (transitions, True)
        assert unknown in " ".join(str(report).split())
        transform.inv(walks(2))
    dummy = make(SPARSE, walks(1)[:1].zero_())
    for rb in (dummy, make(SPARSE, walks(90)), make(SPARSE)):  # the second one has overwritten its oldest goals
        assert not report_of(rb).others_wrote
        assert unknown not in " ".join(str(report_of(rb)).split())


@pytest.mark.parametrize("her_ratio", [0.0, 0.5, 1.0])
def test_samples_are_counted(her_ratio):
    rb = make(SPARSE, walks(10), her_ratio=her_ratio)
    samples = torch.cat([rb.sample() for _ in range(20)])  # all of these samples are counted
    relabelled, reward, report = samples["hindsight", "relabelled"], samples["next", "reward"], report_of(rb)
    assert report.sampled == 2000
    assert report.relabelled == pytest.approx(relabelled.float().mean().item())
    for group, found in (
        (~relabelled, (report.original_reward, report.original_reached)),
        (relabelled, (report.relabelled_reward, report.relabelled_reached)),
    ):
        expected = (reward[group].mean().item(), (reward[group] == 0).float().mean().item())
        assert found == (pytest.approx(expected) if group.any() else (None, None))
    assert not any([report.left, report.foreign])


def test_the_reasons_for_transitions_that_are_not_relabelled_are_distinguished():
    left_in_part, running = walks(24, seed=1), walks(1, steps=180, seed=3)[:60]  # the goals of the first 150 of 600
    other = make(SPARSE, walks(2))
    rb = make(SPARSE, left_in_part, running, capacity=500, her_ratio=1.0, strategy="final")
    rb.storage[torch.arange(100, 150)] = other.storage[torch.arange(50)]
    assert int((~rb[:]["hindsight", "relabelled"]).sum()) == 150
    report = report_of(rb)
    assert (report.foreign, report.left) == pytest.approx((50 / 660, 100 / 660))
    assert f"{50 / 660:.1%} foreign: another transform wrote them" in str(report)
    assert f"{100 / 660:.1%} left the table: their goals are no longer kept" in str(report)
    assert "0.0% ambiguous: they could continue several running episodes" in str(report)


def test_reached_goals_are_unknown_if_their_reward_varies_or_is_of_several_steps():
    def reward(achieved, desired):
        return (achieved - desired).norm(dim=-1).neg() - achieved[:, 0].abs()

    data = walks(4)
    data["next", "reward"] = reward(data["next", "achieved_goal"], data["desired_goal"])[:, None]
    rb = make(reward, data)
    rb.sample()
    assert report_of(rb).original_reached is None
    assert "goal reached    unknown original" in str(report_of(rb))
    rb = buffer_with(make_transform(reward=SPARSE, n_steps=3, capacity=1000), walks(10))
    batch = rb.sample()
    original = batch["next", "reward"][~batch["hindsight", "relabelled"]]
    assert report_of(rb).original_reward == pytest.approx(original.mean().item())
    assert report_of(rb).original_reached is None


def test_the_share_of_reached_goals_counts_the_samples_since_their_reward_is_known():
    rb, data = make(), walks(4)
    data["next", "achieved_goal"][0] = data["desired_goal"][0]
    data["achieved_goal"][1], data["next", "reward"][0] = data["desired_goal"][0], 0.0
    rb.extend(data[:1])  # another goal would be needed to see whether it can be missed
    rb.sample()
    assert report_of(rb).original_reached is None
    rb.extend(data[1:])
    kept = rb.sample()
    kept = kept[~kept["hindsight", "relabelled"][:, 0]]
    assert report_of(rb).original_reached == (kept["next", "reward"] == 0).double().mean().item()


def test_written_copies_are_reported():
    rb = buffer_with(make_augmentation(reward=SPARSE, n_sampled_goal=3), walks(10), walks(1, seed=1)[:5])
    batch = torch.cat([rb.sample() for _ in range(3)])
    report = report_of(rb)
    assert (report.episodes, report.running, report.transitions) == (11, 1, 255)
    assert report.relabelled == pytest.approx(batch["hindsight", "relabelled"].float().mean().item())
    assert (report.her_ratio, report.capacity, report.left) == (0.75, None, None)
    assert "HindsightAugmentation(SparseReward" in str(report)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
def test_a_copy_counts_its_own_samples(how):
    rb = make(SPARSE, walks(4))
    rb.sample()
    copied = how(rb)
    assert report_of(copied).sampled == 0
    copied.sample()
    assert report_of(copied).sampled == report_of(rb).sampled == 100


def test_few_of_many_samples_are_counted():
    rb = make(SPARSE, walks(10))
    for _ in range(640):
        rb.sample()
    assert report_of(rb).sampled == 21 * 100 + 10 * 100  # the first 2,048 transitions, then one sample in 64


def test_the_last_sample_of_a_compiled_transform_is_counted():
    rb = make(SPARSE, walks())
    torch.compile(rb.transform, fullgraph=True, backend="eager")(rb.storage[:100])
    assert report_of(rb).sampled == 100
