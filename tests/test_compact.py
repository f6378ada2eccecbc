"""CompactGoals: redundant entries are not stored, and are restored in samples."""

import pytest
import torch
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import Compose, MultiStepTransform, RenameTransform, TransformedEnv

from support.factories import check_refused, make_augmentation, make_transform
from support.refused import transitions
from support.tape import make_tape
from torchrl_her import CompactGoals

FLAGS = ("done", "terminated", "truncated")
LEFT_OUT = {*FLAGS, ("next", "desired_goal")}


def written(count=50):
    """Return transitions with flags at the root, as collectors write them."""
    data = transitions(count=count)
    return data.update(dict.fromkeys(FLAGS, torch.zeros(count, 1, dtype=torch.bool)))


def buffer(*transforms, kind=ReplayBuffer):
    rb = kind(storage=LazyTensorStorage(1000), transform=Compose(*transforms), batch_size=64)
    rb.extend(written())
    return rb


def hindsight(**options):
    return make_transform(capacity=1000, **options)


@pytest.mark.parametrize("n_step", [[], [MultiStepTransform(3, 0.9)]], ids=["one step", "three steps"])
def test_redundant_entries_are_not_stored_and_restored_in_samples(n_step):
    rb = buffer(CompactGoals(), *n_step, hindsight())
    assert LEFT_OUT.isdisjoint(rb.storage[:].keys(True))
    sample = rb.sample()
    assert torch.equal(sample["desired_goal"], sample["next", "desired_goal"])
    for flag in FLAGS:
        assert sample[flag].shape == sample["next", flag].shape
        assert not sample[flag].any()
    assert sample["hindsight", "relabelled"].any()


def test_copies_of_an_augmentation_are_stored_without_redundant_entries():
    rb = buffer(CompactGoals(), make_augmentation(n_sampled_goal=2))
    assert len(rb) == 150
    assert LEFT_OUT.isdisjoint(rb.storage[:].keys(True))
    sample = rb.sample()
    assert torch.equal(sample["desired_goal"], sample["next", "desired_goal"])


def test_without_hindsight_it_changes_only_the_storage():
    rb = buffer(CompactGoals())
    expected = written()
    sample = rb[:]
    assert set(sample.keys(True, True)) == set(expected.keys(True, True))
    assert (sample == expected).all()


def test_the_input_of_forward_is_not_modified():
    compact = CompactGoals()
    stored = compact.inv(written())
    before = set(stored.keys(True, True))
    compact(stored)
    assert set(stored.keys(True, True)) == before


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        (lambda: (hindsight(), CompactGoals()), "comes after the hindsight transform .* Place CompactGoals first"),
        (lambda: (CompactGoals(desired_goal_key="goal"), hindsight()), "the same desired_goal_key and done_key"),
        (lambda: (CompactGoals(done_key=("agents", "done")), hindsight()), "the same desired_goal_key and done_key"),
        (
            lambda: (RenameTransform(["done"], ["ended"]), CompactGoals(), hindsight()),
            r"RenameTransform comes before HERTransform and reads \['done'\]",
        ),
    ],
)
def test_a_wrong_order_and_other_keys_are_refused(transforms, message):
    with pytest.raises(ValueError, match=message):
        buffer(*transforms())


def test_transforms_after_it_see_the_restored_entries():
    rb = buffer(CompactGoals(), RenameTransform(["done"], ["ended"]), hindsight())
    assert "ended" in rb.sample()


def different_goals(data):
    data["next", "desired_goal"] = data["next", "desired_goal"] + 1
    return data


def flag_at_root(data):
    data["terminated"] = data["terminated"].clone()
    data["terminated"][3] = True
    return data


@pytest.mark.parametrize(("change", "message"), [(different_goals, "goal changes"), (flag_at_root, "'terminated' out")])
@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_entries_that_are_not_redundant_are_refused_and_leave_no_trace(change, message, kind):
    rb = buffer(CompactGoals(), hindsight(), kind=kind)
    check_refused(rb, lambda: rb.extend(change(written())), ValueError, message)


def test_a_checkpoint_with_other_entries_is_refused(tmp_path):
    with_it, without = buffer(CompactGoals(), hindsight()), buffer(hindsight())
    with pytest.raises(ValueError, match="saved with CompactGoals"):
        without.load_state_dict(with_it.state_dict())
    with pytest.raises(ValueError, match="saved without CompactGoals"):
        with_it.load_state_dict(without.state_dict())


def test_rows_stored_with_it_cannot_be_sampled_without_it():
    stored = buffer(CompactGoals(), hindsight()).storage
    rb = ReplayBuffer(storage=stored, transform=hindsight(), batch_size=64)
    with pytest.raises(KeyError, match="sample with it too"):
        rb.sample()


def test_an_augmentation_refuses_a_write_before_it_holds_anything_back():
    rb = buffer(CompactGoals(), make_augmentation())
    hindsight = rb.transform[1]
    rb.extend(written(10))
    with pytest.raises(ValueError, match="goal changes"):
        rb.extend(different_goals(written(5)))
    assert hindsight.held_back == 10
    assert len(rb.extend(hindsight.flush())) == 50


@pytest.mark.parametrize("make", [hindsight, make_augmentation])
def test_it_comes_first_is_used_once_and_never_in_an_environment(make):
    with pytest.raises(ValueError, match="comes after the hindsight transform"):
        buffer(make(), CompactGoals())
    with pytest.raises(ValueError, match="Several CompactGoals"):
        buffer(CompactGoals(), CompactGoals(), make())
    with pytest.raises(ValueError, match="CompactGoals is a transform of replay buffers"):
        TransformedEnv(make_tape(), CompactGoals())
    with pytest.raises(ValueError, match="saved with CompactGoals"):
        make().load_state_dict(CompactGoals().state_dict())
