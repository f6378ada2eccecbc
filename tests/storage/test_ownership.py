"""Samples that own their memory are relabelled in place, with the same result as unmarked samples."""

import copy
import io

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer, TensorStorage
from torchrl.envs import Compose, MultiStepTransform, Transform

from support.factories import make_transform, reward_of
from support.tape import make_serial, make_tape
from torchrl_her import CompactGoals, Future, GoalReward, HERTransform, PackedStorage, ReachedReward, mark_as_owned
from torchrl_her.storage.ownership import owned_entries


class OwningStorage(LazyTensorStorage):
    """TorchRL's storage with samples that are marked copies."""

    def get(self, index):
        found = super().get(index)
        return mark_as_owned(found) if isinstance(index, torch.Tensor) and index.ndim else found


def module_that_reads_what_it_replaces():
    """A reward that reads the stored reward and flag, and writes an additional entry."""

    def function(achieved, desired, reward, terminated):
        hit = (achieved == desired).all(-1, keepdim=True)
        return torch.where(hit, reward + 1, reward - 1), hit | terminated, hit.clone()

    keys = [("next", "achieved_goal"), "desired_goal", ("next", "reward"), ("next", "terminated")]
    return TensorDictModule(function, keys, [*keys[2:], "hit"])


class RewardOfReward(GoalReward):
    """A reward that reads the stored reward and replaces it."""

    info_keys = (("next", "reward"),)

    def __init__(self):
        super().__init__(reward_of)

    def evaluate(self, achieved, desired, tensordict):
        """Return the reward of the goals plus a hundredth of the stored reward."""
        (reward,) = super().evaluate(achieved, desired, tensordict)
        return [reward.reshape(-1) + tensordict["next", "reward"].reshape(-1) / 100]


MAKERS = {
    "goals": lambda: make_transform(reward=GoalReward(reward_of)),
    "goals, with terminations": make_transform,
    "a module": lambda: make_transform(reward=module_that_reads_what_it_replaces()),
    "a stored entry that is replaced": lambda: make_transform(reward=RewardOfReward()),
    "all rewards": lambda: make_transform(recompute_all_rewards=True),
    "extra goals and info": lambda: make_transform(extra_goals={"actor_goal": Future(own=False)}, info=True),
    "sequences": lambda: make_transform(sequence_length=4),
}


def filled(make, storage):
    rb = TensorDictReplayBuffer(storage=storage, transform=make(), batch_size=64)
    rb.extend(make_tape().rollout(150, break_when_any_done=False))
    return rb


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("kind", [PackedStorage, OwningStorage])
def test_marked_and_unmarked_samples_have_the_same_result_and_the_storage_is_unchanged(make, kind):
    rb = filled(make, kind(200))
    her, before = rb.transform[0], rb.storage[:].clone()
    for seed in range(20):
        marked = rb.storage.get(torch.randint(150, (64,)))
        unmarked = marked.clone()
        assert owned_entries(marked)
        assert not owned_entries(unmarked)
        original, goals = unmarked.clone(), marked["desired_goal"]
        torch.manual_seed(seed)
        in_place = her(marked)
        torch.manual_seed(seed)
        expected = her(unmarked)
        assert in_place is marked
        assert in_place["desired_goal"] is goals
        assert set(in_place.keys(True, True)) == set(expected.keys(True, True))
        assert (in_place == expected).all()
        assert (unmarked == original).all()
    assert expected["hindsight", "relabelled"].any()
    assert (rb.storage[:] == before).all()


def test_samples_of_packed_storage_are_marked_but_views_are_not():
    storage = PackedStorage(20)
    storage.set(range(10), TensorDict({"a": torch.arange(10)}, [10]))
    assert owned_entries(storage.get(torch.tensor([3, 4])))
    for index in (slice(None), slice(2, 5), 3):
        assert not owned_entries(storage.get(index))


@pytest.mark.parametrize(
    "derive",
    [TensorDict.copy, TensorDict.clone, copy.deepcopy, lambda sample: sample[:2], lambda sample: sample.exclude("a")],
)
def test_copies_of_a_marked_sample_are_not_marked(derive):
    sample = mark_as_owned(TensorDict({"a": torch.arange(4), "b": torch.arange(4)}, [4]))
    assert not owned_entries(derive(sample))


@pytest.mark.parametrize("sample", [torch.zeros(3), {"a": torch.zeros(3)}])
def test_only_tensordicts_can_be_marked(sample):
    with pytest.raises(TypeError, match=r"Only TensorDicts can be marked, got a (Tensor|dict)"):
        mark_as_owned(sample)


def saved_and_loaded(sample):
    file = io.BytesIO()
    torch.save(sample, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("derive", [lambda rb: rb.sample(), lambda rb: saved_and_loaded(rb.storage[torch.arange(50)])])
def test_a_sample_that_becomes_a_storage_is_not_written_into(derive):
    source = filled(make_transform, PackedStorage(200))
    data = derive(source)
    rb = TensorDictReplayBuffer(
        storage=TensorStorage(data), transform=source.transform[0].clone(), batch_size=len(data)
    )
    before = data.clone()
    assert rb.sample()["hindsight", "relabelled"].any()
    assert rb[:]["hindsight", "relabelled"].any()
    assert (data == before).all()


def test_entries_set_by_a_collate_function_are_not_written_into():
    goal = torch.full((64, 3), 7.0)
    rb = TensorDictReplayBuffer(
        storage=PackedStorage(200),
        collate_fn=lambda sample: sample.set("desired_goal", goal).set(("next", "desired_goal"), goal),
        transform=make_transform(),
        batch_size=64,
    )
    rb.extend(make_tape().rollout(150, break_when_any_done=False))
    assert rb.sample()["hindsight", "relabelled"].any()
    assert (goal == 7.0).all()


def test_an_entry_that_another_key_shares_is_not_written_into():
    rb = filled(make_transform, PackedStorage(200))
    sample = rb.storage.get(torch.arange(64))
    outcomes = sample["next", "achieved_goal"].clone()
    sample["desired_goal"] = sample["next", "achieved_goal"]
    assert rb.transform[0](sample)["hindsight", "relabelled"].any()
    assert (sample["next", "achieved_goal"] == outcomes).all()


def test_missing_goals_of_adopted_data_are_also_created_in_marked_samples():
    arrays = {
        "observation": torch.arange(10.0).view(10, 1),
        "next": {"observation": torch.arange(1.0, 11.0).view(10, 1)},
    }
    arrays["next"] |= {"done": torch.arange(10).view(10, 1) == 9, "terminated": torch.zeros(10, 1, dtype=torch.bool)}
    her = HERTransform(ReachedReward(), her_ratio=1.0, achieved_goal_key="observation", capacity=10)
    data = her.adopt(TensorDict(arrays, [10]))
    marked = mark_as_owned(data[torch.arange(10)])
    torch.manual_seed(0)
    expected = her(marked.clone())
    torch.manual_seed(0)
    assert (her(marked) == expected).all()
    assert set(data["next"].keys()) == {"observation", "done", "terminated"}


class SetsAConstant(Transform):
    """Replaces the goals by its own tensor."""

    def __init__(self):
        super().__init__()
        self.goal = torch.full((64, 3), 7.0)

    def forward(self, sample):
        """Set the goals."""
        return sample.set("desired_goal", self.goal).set(("next", "desired_goal"), self.goal)


def test_an_entry_that_an_earlier_transform_has_set_is_not_written_into():
    earlier = SetsAConstant()
    rb = filled(lambda: Compose(earlier, make_transform()), PackedStorage(200))
    batch = rb.sample()
    assert batch["hindsight", "relabelled"].any()
    assert (earlier.goal == 7.0).all()


@pytest.mark.parametrize("before", [CompactGoals, lambda: MultiStepTransform(3, 0.9)])
def test_behind_another_transform_the_storage_is_unchanged(before):
    rb = ReplayBuffer(storage=PackedStorage(200, ndim=2), transform=Compose(before(), make_transform()), batch_size=64)
    rb.extend(make_serial(0, 1).rollout(60, break_when_any_done=False))
    stored = rb.storage[:].clone()
    assert rb.sample()["hindsight", "relabelled"].any()
    assert (rb.storage[:] == stored).all()


def test_a_transform_that_is_inserted_after_the_last_write_is_seen():
    rb = filled(make_transform, PackedStorage(200))
    earlier = SetsAConstant()
    rb.insert_transform(0, earlier)
    rb.sample()
    assert (earlier.goal == 7.0).all()
    assert isinstance(rb.transform[1], HERTransform)
