"""Data sets that adopt() refuses or warns about, and the calls that an adopting transform refuses."""

import warnings
from functools import partial

import pytest
import torch
from tensordict import tensorclass
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer, TensorStorage, Unbounded
from torchrl.envs import CatTensors, Compose, MultiStepTransform

from support.data_sets import (
    NEXT_ACHIEVED,
    NEXT_DESIRED,
    REWARD,
    adopting_buffer,
    make_hindsight,
    without_goals,
)
from support.factories import check_refused, same
from support.goals import reached
from support.refused import changed, transitions, wider, with_nan, without
from support.rewards import nearness
from torchrl_her import GoalReward, HERTransform, PastDesired, ReachedReward, SparseReward
from torchrl_her.offline import data_set

COUNT = 100  # four episodes of 25 steps
make = partial(make_hindsight, reward=nearness, capacity=COUNT)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(data_set, "PIECE_ROWS", 30)


def data(count=COUNT):
    return transitions(count=count)


def at(row, value, key):
    """Return a change of one row."""

    def change(td):
        td[key][row] = value
        return td

    return change


def relabelled(row):
    return lambda td: td.set(("hindsight", "relabelled"), (torch.arange(len(td)) == row)[:, None])


def rounded(row):
    """Return a change to integer goals, after which one outcome has a fraction."""

    def change(td):
        for key in ("desired_goal", NEXT_DESIRED):
            td[key] = td[key].long()
        td[NEXT_ACHIEVED][row, 1] += 0.5
        return td

    return change


def with_lost_end(td):
    td["observation"] = torch.ones(len(td), 1)
    td["next", "observation"] = torch.ones(len(td), 1)
    for key in (NEXT_ACHIEVED, NEXT_DESIRED, ("next", "observation")):
        td[key][74] = 0
    return td


BAD = {
    "NaN": (with_nan(77), ValueError, "achieved goal of row 77 of the data is NaN"),
    "NaN, n-D": (
        lambda td: with_nan(77)(td).reshape(4, 25), ValueError, r"achieved goal of row \[3, 2\] of the data is NaN"),
    "NaN, alternating": (
        lambda td: with_nan(77)(td).set(("collector", "traj_ids"), torch.arange(100) % 3),
        ValueError, "achieved goal of row 77 of the data is NaN"),
    "relabelled": (relabelled(61), ValueError, r"relabelled \(row 61 of the data\)"),
    "rounded": (rounded(51), ValueError, "for example of row 51 of the data"),
    "a lost end": (with_lost_end, ValueError, "row 74 of the data.*environment dropped it"),
    "no achieved goal": (without("achieved_goal"), KeyError, "no entry 'achieved_goal'"),
    "no next achieved goal": (without(NEXT_ACHIEVED), KeyError, "only at the root"),
    "one desired goal": (without(NEXT_DESIRED), KeyError, "only at the root"),
    "no done flag": (without(("next", "done")), KeyError, "done_key"),
    "no terminated": (without(("next", "terminated")), KeyError, "done_key"),
    "wide goals": (changed(wider, "achieved_goal", NEXT_ACHIEVED), ValueError, "achieved goal has the shape"),
    "wide rewards": (changed(lambda value: value.expand(-1, 3), REWARD), ValueError, "reward module wrote"),
    "n-step": (lambda td: td.set("steps_to_next_obs", torch.ones(len(td), 1)), ValueError, "n-step transitions"),
    "empty": (lambda td: td[:0], ValueError, "no transitions"),
    "no batch": (lambda td: td[0], ValueError, r"batch size \[\]"),
    "all padding": (
        lambda td: td.set(("collector", "mask"), torch.zeros(len(td), dtype=torch.bool)), ValueError, "padding"),
    "never loaded": (lambda td: td.zero_(), ValueError, "are zeros, .*load_minari"),
    "time first": (
        lambda td: td.reshape(4, 25).transpose(0, 1).contiguous(), ValueError, "time must be the last dimension"),
    "a last dimension of one": (lambda td: td.unsqueeze(-1), ValueError, "time must be the last dimension"),
    "another desired goal key": (
        lambda td: td.rename_key_("desired_goal", "goal").rename_key_(NEXT_DESIRED, ("next", "nested", "desired_goal")),
        KeyError, "no entry 'desired_goal'.*desired_goal_key"),
    "another reward key": (
        lambda td: td.rename_key_(REWARD, ("next", "agent", "reward")), KeyError, "reward_key"),
    "a dict": (lambda td: td.to_dict(), TypeError, "must be a TensorDict, got a dict"),
    "wide flags": (changed(lambda flag: flag.expand(-1, 3), ("next", "done")), ValueError, "one value per transition"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*do not continue an episode", "ignore:The reward module gives")
@pytest.mark.parametrize("with_spec", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_refused_and_changes_nothing(name, with_spec):
    change, error, message = BAD[name]
    dtype = torch.int64 if name == "rounded" else torch.float32
    transform = make_hindsight(
        reward=GoalReward(nearness, terminated_fn=reached),
        capacity=COUNT,
        goal_spec=Unbounded((2,), dtype=dtype) if with_spec else None,
    )
    before = transform.get_extra_state()
    table, tracker = transform.table, transform.tracker
    bad = change(data())
    with pytest.raises(error, match=message):
        transform.adopt(bad)
    assert same(transform.get_extra_state(), before)
    assert transform.table is table
    assert transform.tracker is tracker
    assert transform.adopted is None
    assert transform.report().transitions == 0
    good = changed(lambda goals: goals.long(), "desired_goal", NEXT_DESIRED)(data()) if name == "rounded" else data()
    assert adopting_buffer(good, transform).sample()["hindsight", "relabelled"].all()


def test_a_tensorclass_is_refused():
    @tensorclass
    class Data:
        achieved_goal: torch.Tensor

    with pytest.raises(TypeError, match="to_tensordict"):
        make().adopt(Data(torch.zeros(3, 2), batch_size=3))


@pytest.mark.parametrize("padding", [0, 10])
def test_a_capacity_smaller_than_the_data_is_refused_with_the_number_to_use(padding):
    td = data()
    if padding:
        td["collector", "mask"] = torch.arange(COUNT) < COUNT - padding
    needed = COUNT - padding
    with pytest.raises(ValueError, match=f"{needed} transitions.*capacity is {needed - 1}: pass capacity={needed} "):
        make(capacity=needed - 1).adopt(td)
    make(capacity=needed).adopt(td)


def test_an_episode_longer_than_the_capacity_is_refused():
    td = data()
    td["next", "done"].zero_()
    with pytest.raises(ValueError, match="pass capacity=100 "):
        make(capacity=50).adopt(td)


# Warnings


def warnings_of(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def test_good_data_causes_no_warning():
    assert warnings_of(lambda: adopting_buffer(data(), make()).sample()) == []


def test_shuffled_data_is_reported_with_a_row():
    td = transitions(count=400)[torch.randperm(400)]
    (message,) = warnings_of(lambda: make(capacity=400).adopt(td))
    assert "do not continue an episode (such as row 1" in message
    assert "shuffled" in message


def test_other_rewards_are_reported_with_a_row():
    td = data()
    td[REWARD][66] -= 1
    (message,) = warnings_of(lambda: make().adopt(td))
    assert "(row 66 of the data)" in message


def test_ends_on_success_are_reported():
    td = data()
    td["desired_goal"][24] = td[NEXT_DESIRED][24] = td[NEXT_ACHIEVED][24]
    td[REWARD][24] = 0.0
    td["next", "terminated"][24] = True
    transform = HERTransform(nearness, capacity=COUNT)
    assert any("does not recompute" in message for message in warnings_of(lambda: transform.adopt(td)))


def with_copies(td):
    td["observation"] = torch.cat([td["achieved_goal"], td["desired_goal"]], 1)
    td["next", "observation"] = torch.cat([td[NEXT_ACHIEVED], td[NEXT_DESIRED]], 1)
    return td


@pytest.mark.parametrize(("her_ratio", "rewritten"), [(1.0, False), (1.0, True), (0.0, False)])
def test_copies_of_the_goal_are_searched_at_the_first_sample(her_ratio, rewritten):
    td = with_copies(transitions(count=300))
    transform = make(capacity=300, her_ratio=her_ratio)
    cat = [
        CatTensors(["achieved_goal", "desired_goal"], "observation", del_keys=False),
        CatTensors([NEXT_ACHIEVED, NEXT_DESIRED], ("next", "observation"), del_keys=False),
    ]
    adopted = []
    assert warnings_of(lambda: adopted.append(transform.adopt(td))) == []
    transforms = Compose(transform, *(cat if rewritten else ()))
    rb = TensorDictReplayBuffer(storage=TensorStorage(adopted[0]), transform=transforms, batch_size=10)
    found = warnings_of(rb.sample)
    assert len(found) == (her_ratio == 1.0 and not rewritten)
    assert all("copy of the desired goal is in 'observation'" in message for message in found)
    assert warnings_of(rb.sample) == []  # once


# Calls that an adopting transform refuses


def test_writes_are_refused_and_change_nothing():
    rb = adopting_buffer(data(), make())
    for action in (
        lambda: rb.extend(data()),
        lambda: rb.add(data()[0]),
        lambda: rb.__setitem__(3, data()[3]),
        lambda: rb.extend(data()[:0]),
        rb.transform[0].clear,
    ):
        check_refused(rb, action, RuntimeError, "adopted a data set.*ReplayBufferEnsemble")


def test_a_transform_adopts_only_one_data_set():
    transform = make()
    transform.adopt(data())
    with pytest.raises(ValueError, match="already adopted a data set"):
        transform.adopt(data())


def test_a_transform_that_has_written_does_not_adopt():
    transform = make()
    TensorDictReplayBuffer(storage=LazyTensorStorage(COUNT), transform=transform).extend(data(10))
    with pytest.raises(ValueError, match="needs an empty goal table"):
        transform.adopt(data())
    loaded = make()
    loaded.load_state_dict(transform.state_dict())
    with pytest.raises(ValueError, match="needs an empty goal table"):
        loaded.adopt(data())


def test_a_shared_table_is_refused():
    transform = make(goal_spec=Unbounded((2,))).share_memory_()
    with pytest.raises(ValueError, match="already share the goal table"):
        transform.adopt(data())


def test_goals_must_have_the_shape_of_the_spec():
    with pytest.raises(ValueError, match="goal_spec"):
        make(goal_spec=Unbounded((3,))).adopt(data())


def test_multi_step_transforms_are_refused_when_sampling():
    transform = make()
    storage = TensorStorage(transform.adopt(data()))
    rb = TensorDictReplayBuffer(storage=storage, transform=Compose(MultiStepTransform(3, 0.9), transform), batch_size=9)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"MultiStepTransform.*rb\.extend"):
            rb.sample()


def test_a_state_without_a_data_set_is_not_loaded_over_one():
    transform, other = make(), make()
    transform.adopt(data())
    before = transform.get_extra_state()
    with pytest.raises(ValueError, match="load into a new buffer"):
        transform.load_state_dict(other.state_dict())
    assert same(before, transform.get_extra_state())


# Data without goals or rewards


@pytest.mark.parametrize("dropped", [("desired_goal", NEXT_DESIRED, REWARD), ("desired_goal", NEXT_DESIRED)])
def test_data_without_goals_needs_a_her_ratio_of_one(dropped):
    with pytest.raises(ValueError, match=r"no desired goals under .*, and with her_ratio=0\.8.*pass her_ratio=1"):
        make(her_ratio=0.8).adopt(data().exclude(*dropped))
    transform = make(her_ratio=1.0)
    rb = adopting_buffer(data().exclude(*dropped), transform)
    rb.sample()
    transform.her_ratio = 0.5
    with pytest.raises(ValueError, match="pass her_ratio=1"):
        rb.sample()
    loaded = make(her_ratio=0.8)
    with pytest.raises(ValueError, match="pass her_ratio=1"):
        loaded.load_state_dict(transform.state_dict())


def test_past_desired_goals_need_desired_goals():
    with pytest.raises(ValueError, match="PastDesired"):
        make(strategy=PastDesired(), capacity=200).adopt(without_goals(data()))


def test_reached_reward_cannot_compute_rewards_of_original_goals():
    with pytest.raises(ValueError, match="ReachedReward cannot compute rewards for original goals"):
        HERTransform(ReachedReward(), capacity=COUNT).adopt(data().exclude(REWARD))
    HERTransform(ReachedReward(), her_ratio=1.0, capacity=COUNT).adopt(data().exclude(REWARD))


@pytest.mark.parametrize("what", ["other data", "stamps of another transform"])
def test_rows_that_were_not_adopted_are_refused_if_they_have_no_goals(what):
    transform, other = make(), make()
    transform.adopt(without_goals(data()))
    rows = other.adopt(without_goals(data()))
    if what == "other data":
        rows["hindsight_stamp"].zero_()
    rb = TensorDictReplayBuffer(storage=TensorStorage(rows), transform=transform, batch_size=9)
    with pytest.raises(ValueError, match=r"no desired goals, and contains transitions that .* has not adopted"):
        rb.sample()


def test_unstamped_data_is_refused():
    transform = make()
    transform.adopt(data())
    rb = TensorDictReplayBuffer(storage=TensorStorage(data()), transform=transform, batch_size=9)
    with pytest.raises(KeyError, match="have no stamp"):
        rb.sample()


def test_rewards_of_another_shape_are_found_in_data_without_goals():
    class Broken(SparseReward):
        def forward(self, td):
            return super().forward(td).set(REWARD, torch.zeros(len(td), 2))

    with pytest.raises(ValueError, match="reward module wrote"):
        HERTransform(Broken(0.1), her_ratio=1.0, capacity=COUNT).adopt(without_goals(data()))


def test_a_refused_state_leaves_the_transform_as_it_was():
    source = make()
    source.adopt(data())
    target = make_hindsight(capacity=COUNT + 1)
    target.adopt(data()[:50])
    adopted = target.adopted
    with pytest.raises(ValueError, match="saved goal table holds"):
        target.load_state_dict(source.state_dict())
    assert target.adopted is adopted
    writer = make_hindsight(capacity=COUNT + 1)
    writer_rb = TensorDictReplayBuffer(storage=LazyTensorStorage(COUNT), transform=writer)
    writer_rb.extend(data()[:50])
    with pytest.raises(ValueError, match="saved goal table holds"):
        writer.load_state_dict(source.state_dict())
    writer_rb.extend(data()[50:])
    assert writer.adopted is None


def test_compiling_checks_the_other_transforms_of_adopted_data_first():
    transform = make()
    storage = TensorStorage(transform.adopt(data()))
    rb = TensorDictReplayBuffer(storage=storage, transform=Compose(MultiStepTransform(2, 0.9), transform))
    with pytest.raises(ValueError, match="MultiStepTransform"):
        rb.transform[1].compile(backend="eager")


def test_a_later_sample_of_other_data_without_goals_is_refused_too():
    transform, other = (make_hindsight(her_ratio=1.0, capacity=COUNT) for _ in range(2))
    adopted = transform.adopt(without_goals(data()))
    transform(adopted[:10])
    with pytest.raises(ValueError, match="has not adopted"):
        transform(other.adopt(without_goals(data()))[:10])


@pytest.mark.parametrize("still", [True, False], ids=["constant goals", "equal goals at each time"])
def test_time_in_the_last_dimension_is_accepted_if_goals_repeat(still):
    """Episodes of one step, [4, 25], end everywhere, and continue along no dimension or along both."""
    td = data()
    td["next", "truncated"].fill_(True)
    td["next", "done"].fill_(True)
    for key in ("achieved_goal", NEXT_ACHIEVED):
        td[key] = (
            torch.ones_like(td[key]) if still else (torch.arange(COUNT) % 25 % 2 + 1).float()[:, None].expand(-1, 2)
        )
    make().adopt(td.reshape(4, 25))
