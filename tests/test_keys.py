import copy
import dataclasses
import pickle

import pytest

from torchrl_her import HERKeys

KEYS = HERKeys(("goals", ("achieved",)), "target", ("agent", "gain"), ("agent", "done"), None, mask=("kept",))


def test_the_other_keys_follow_from_the_given_ones():
    assert (KEYS.achieved_goal, KEYS.next_achieved_goal) == (("goals", "achieved"), ("next", "goals", "achieved"))
    assert (KEYS.desired_goal, KEYS.next_desired_goal) == ("target", ("next", "target"))
    assert (KEYS.reward, KEYS.next_reward) == (("agent", "gain"), ("next", "agent", "gain"))
    assert KEYS.flags == (("agent", "done"), ("agent", "terminated"), ("agent", "truncated"))
    assert KEYS.next_flags == tuple(("next", *flag) for flag in KEYS.flags)
    assert (KEYS.trajectory, KEYS.mask) == (None, "kept")
    assert HERKeys(trajectory=("next", "episode")).trajectory == ("next", "episode")
    assert HERKeys().flags == ("done", "terminated", "truncated")
    assert HERKeys().next_flags == (("next", "done"), ("next", "terminated"), ("next", "truncated"))


def test_its_representation_shows_the_keys_that_differ_from_the_defaults():
    assert repr(HERKeys()) == "HERKeys()"
    assert repr(HERKeys(trajectory=None, desired_goal="target")) == "HERKeys(desired_goal='target', trajectory=None)"
    assert eval(repr(KEYS)) == KEYS


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda keys: pickle.loads(pickle.dumps(keys))])
def test_copies_are_equal_and_cannot_be_changed(copied):
    twin = copied(KEYS)
    assert twin == KEYS != HERKeys()
    assert hash(twin) == hash(KEYS)
    assert twin.next_flags == KEYS.next_flags
    with pytest.raises(dataclasses.FrozenInstanceError):
        twin.reward = "gain"
