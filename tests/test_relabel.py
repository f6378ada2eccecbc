"""Rewards and flags recomputed by any module, their comparison with stored rewards, and refused modules."""

import pytest
import torch
from tensordict.nn import TensorDictModule

from support.factories import check_refused
from support.refused import (
    NEXT_ACHIEVED,
    REWARD,
    changed,
    check_leaves_no_trace,
    make_small_buffer,
    transitions,
    without,
)
from support.rewards import check_relabelled, distance, distance_of_row, nearness, point_reach, sample_of
from torchrl_her import EnvReward, GoalReward, HERTransform, SparseReward

GOALS = [NEXT_ACHIEVED, "desired_goal"]
TERMINATED = ("next", "terminated")


def test_a_module_may_read_the_action_and_any_other_entry():
    written = point_reach()
    written["next", "wind"] = torch.rand(len(written), 1)

    def reward_fn(achieved, desired, action, velocity, wind):
        effort = (action**2).sum(dim=-1, keepdim=True)
        return -distance(achieved, desired)[:, None] - effort * wind - velocity[..., 2:].sum(-1, True)

    def reward(row):
        effort = sum(each**2 for each in row["action"].tolist())
        return -distance_of_row(row) - effort * row["next", "wind"].item() - sum(row["observation"][2:].tolist())

    module = TensorDictModule(reward_fn, [*GOALS, "action", "observation", ("next", "wind")], [REWARD])
    check_relabelled(module, reward, written=written)


@pytest.mark.parametrize("terminates", [True, False])
@pytest.mark.parametrize("others", [[], [("next", "success"), "observation", "new"]])
def test_a_module_may_end_episodes_and_its_other_outputs_change_no_entry(others, terminates):
    written = point_reach()
    written["next", "success"] = torch.rand(len(written), 1)
    written["observation"] = torch.rand(len(written), 4)

    def reward_fn(achieved, desired):
        far = distance(achieved, desired)[:, None]
        return (-far, *[far < 0.3][:terminates], *(far, far.expand(-1, 4), far)[: len(others)])

    module = TensorDictModule(reward_fn, GOALS, [REWARD, *[TERMINATED][:terminates], *others])
    terminated = (lambda row: distance_of_row(row) < 0.3) if terminates else None
    batch = check_relabelled(module, lambda row: -distance_of_row(row), terminated, written=written)
    assert "new" not in batch


class Tenfold(GoalReward):
    """Overrides ``forward``."""

    def forward(self, tensordict):
        """Write ten times the reward."""
        tensordict = super().forward(tensordict)
        return tensordict.set(REWARD, 10 * tensordict[REWARD])


class TenfoldAndMore(Tenfold):
    """Also writes another entry."""

    def set_keys(self, **keys):
        """Add another out_key."""
        super().set_keys(**keys)
        self.out_keys = [*self.out_keys, "new"]

    def evaluate(self, achieved, desired, tensordict):
        """Return the reward and the distance."""
        return [*super().evaluate(achieved, desired, tensordict), distance(achieved, desired)]


@pytest.mark.parametrize("kind", [Tenfold, TenfoldAndMore])
def test_a_subclass_of_goal_reward_may_override_forward_and_write_more(kind):
    written = point_reach()
    written[REWARD] = 10 * -distance(written[NEXT_ACHIEVED], written["desired_goal"])[:, None]
    batch = check_relabelled(
        kind(lambda *goals: -distance(*goals)), lambda row: -10 * distance_of_row(row), written=written
    )
    assert "new" not in batch


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_of_a_reward_are_called(register):
    reward, called = SparseReward(0.05), []
    rb = make_small_buffer(reward=reward, her_ratio=1.0)
    getattr(rb.transform[0].reward, register)(lambda *_: called.append(1))
    rb.extend(transitions(count=25))
    called.clear()
    rb.sample(5)
    assert called


def test_a_reward_keeps_the_stored_dtype():
    written = point_reach()
    written[REWARD] = written[REWARD].double()
    check_relabelled(
        lambda achieved, desired: (achieved == desired).all(dim=-1),
        lambda row: float(distance_of_row(row) == 0),
        written=written,
    )


def test_a_reward_with_parameters_passes_no_gradient_to_the_sample():
    weights = torch.nn.Linear(4, 1)
    module = TensorDictModule(lambda *goals: weights(torch.cat(goals, dim=-1)), GOALS, [REWARD])
    assert not sample_of(point_reach(), module)[REWARD].requires_grad


# Refused at the first write


def raises(achieved, desired):
    raise RuntimeError("no reward today")


def all_pairs(achieved, desired):
    return (achieved[:, None] - desired[None]).norm(dim=-1)


def below_one(function):
    return SparseReward(0.1, terminated_fn=lambda achieved, desired: function(achieved, desired) < 1)


ONE_VALUE = r"\('next', '{}'\) returned the shape {}.*one value per row"
WRONG_SHAPES = {
    "all pairs": (all_pairs, ""),
    "one for all": (lambda achieved, desired: (achieved - desired).norm(), r"\(\)"),
    "one for all, in a list": (lambda achieved, desired: (achieved - desired).norm()[None], ""),
    "one per number": (lambda achieved, desired: achieved - desired, r"\(\d+, 2\)"),
}
WRONG_MODULES = [lambda achieved, desired: achieved - desired, all_pairs]
MODULE_SHAPE = r"shape .*under \('next', 'reward'\), but stored rewards have the shape \(\d+, 1\)"
REFUSED = {
    "nothing": (lambda achieved, desired: None, TypeError, "must return one value per row, but it returned None"),
    "an error": (raises, RuntimeError, "no reward today"),
    **{f"rewards, {name}": (function, ValueError, ONE_VALUE.format("reward", shape) + ".*dim=-1")
       for name, (function, shape) in WRONG_SHAPES.items()},
    **{f"terminations, {name}": (below_one(function), ValueError, ONE_VALUE.format("terminated", shape))
       for name, (function, shape) in WRONG_SHAPES.items()},
    **{f"rewards of a module, {number}": (TensorDictModule(function, GOALS, [REWARD]), ValueError, MODULE_SHAPE)
       for number, function in enumerate(WRONG_MODULES)},
}  # fmt: skip


@pytest.mark.parametrize("how", ["extend", "add"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_reward_that_fails_or_has_the_wrong_shape_is_refused_at_the_first_write(name, how):
    reward, error, message = REFUSED[name]
    rb, chunk = make_small_buffer(reward), transitions()
    check_refused(rb, lambda: rb.extend(chunk) if how == "extend" else rb.add(chunk[0]), error, message)


def test_rewards_may_be_stored_without_a_last_dimension():
    rb = make_small_buffer(her_ratio=1.0)
    data = transitions(count=25)
    data["next", "reward"] = data["next", "reward"][:, 0]
    rb.extend(data)
    batch = rb.sample(50)
    assert batch["hindsight", "relabelled"].all()
    expected = nearness(batch["next", "achieved_goal"], batch["desired_goal"])
    assert torch.equal(batch["next", "reward"], expected)


def test_rewards_of_several_agents_need_a_module_that_writes_them_all():
    several = changed(lambda reward: reward[:, None].expand(-1, 3, 1), REWARD)
    check_leaves_no_trace(several, ValueError, r"rewards have the shape \(10, 3, 1\).*one reward per agent")


def test_a_class_in_place_of_a_reward_is_refused():
    with pytest.raises(TypeError, match=r"is the class EnvReward: pass an instance, EnvReward\(\.\.\.\)"):
        HERTransform(EnvReward)


@pytest.mark.parametrize(
    ("key", "message"),
    [(REWARD, r"\('next', 'reward'\).*reward_key="), (TERMINATED, r"\('next', 'terminated'\).*done_key=")],
)
def test_an_entry_that_relabelling_recomputes_and_that_is_not_stored_is_refused(key, message):
    reward = SparseReward(0.1, terminated_fn=lambda achieved, desired: (achieved == desired).all(-1))
    check_leaves_no_trace(without(key), KeyError, message, reward=reward)


@pytest.mark.parametrize("options", [{}, {"terminated_fn": None}])
def test_flags_that_are_not_recomputed_may_be_missing(options):
    rb = make_small_buffer(GoalReward(nearness, **options))
    rb.extend(transitions().exclude(TERMINATED, ("next", "truncated")))
    assert rb.sample(50)["hindsight", "relabelled"].sum() == 0  # the episode is still running
    assert len(rb) == 10


def test_a_module_that_writes_no_reward_is_refused():
    message = r"must write \('next', 'reward'\), but its out_keys are \['reward'\].*reward_key="
    with pytest.raises(ValueError, match=message):
        HERTransform(TensorDictModule(distance, GOALS, ["reward"]))


# Rewards that differ from stored rewards


@pytest.mark.filterwarnings("error")
def test_a_reward_that_differs_from_stored_rewards_is_reported_once():
    rb = make_small_buffer(lambda achieved, desired: 10 * nearness(achieved, desired))
    with pytest.warns(UserWarning, match=r"gives -22\.36.* whose stored reward is -2\.236.*EnvReward\(env\)"):
        rb.extend(transitions())
    rb.extend(transitions(10))


@pytest.mark.filterwarnings("error")
def test_rewards_of_padding_are_not_compared():
    rb = make_small_buffer(mask_key="mask")
    chunk = transitions().set("mask", torch.arange(10) < 8)
    chunk[REWARD][8:] = 0.0
    rb.extend(chunk)
