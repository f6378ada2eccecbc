"""Bad input raises a clear error as early as possible and leaves the buffer unchanged."""

import math
import re

import pytest
import torch
from tensordict import TensorDict, tensorclass
from torchrl.data import Composite, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer, Unbounded
from torchrl.envs import Compose, GymEnv, MultiStepTransform, StepCounter, TransformedEnv

from support.factories import check_refused, same, state_of
from support.refused import (
    ACHIEVED_GOALS,
    DESIRED_GOALS,
    NEXT_ACHIEVED,
    NEXT_DESIRED,
    VectorizedInProcess,
    both,
    changed,
    check_leaves_no_trace,
    make_small_buffer,
    transitions,
    wider,
    with_nan,
    without,
)
from support.rewards import POINT_REACH, distance
from torchrl_her import Future, HERTransform, HindsightAugmentation

# Writes


def first(data):
    return data[0]


def set_entry(key, value):
    return lambda data: data.set(key, value)


def reach_103(data):
    data[NEXT_ACHIEVED][4] = torch.tensor([0.0, 103.0])
    return data


FOURTH = (torch.arange(10) == 4)[:, None]
INTEGERS_AND_HALVES = both(
    changed(torch.Tensor.long, *DESIRED_GOALS), changed(lambda goals: goals + 0.5, *ACHIEVED_GOALS)
)
DOUBLE = changed(torch.Tensor.double, *ACHIEVED_GOALS, *DESIRED_GOALS)
IN_PARTS = changed(lambda goals: TensorDict(x=goals[..., 0], batch_size=len(goals)), *ACHIEVED_GOALS, *DESIRED_GOALS)
NAN_AT_103 = both(changed(lambda goals: goals * torch.tensor([0.0, 1.0]), NEXT_ACHIEVED), reach_103)
OTHER_GOAL_LATER = changed(lambda goals: goals - (torch.arange(10) == 7)[:, None].float(), NEXT_DESIRED)
LEFT_OUT = r"compact_obs=True leaves it out \(use False\), and so does NextObservationDelta"

BAD_WRITES = {  # the change that spoils a good write, the error and its message
    "no achieved goal": (without("achieved_goal"), KeyError,
        r"no entry 'achieved_goal'.*achieved_goal_key=.*Present entries: .*desired_goal"),
    "no desired goal": (without("desired_goal"), KeyError,
        r"no entry 'desired_goal'.*desired_goal_key=.*Present entries: .*achieved_goal"),
    "no achieved goal anywhere": (without(*ACHIEVED_GOALS), KeyError, r"no entry 'achieved_goal'.*achieved_goal_key="),
    "no next achieved goal": (without(NEXT_ACHIEVED), KeyError, rf"\('next', 'achieved_goal'\).*{LEFT_OUT}"),
    "no next desired goal": (without(NEXT_DESIRED), KeyError, rf"\('next', 'desired_goal'\).*{LEFT_OUT}"),
    "compact observations": (without(NEXT_ACHIEVED, NEXT_DESIRED), KeyError,
        rf"\('next', 'achieved_goal'\).*{LEFT_OUT}"),
    "no done": (without(("next", "done")), KeyError, r"\('next', 'done'\).*done_key="),
    "a goal in parts": (IN_PARTS, TypeError, "'achieved_goal' must be a tensor, got a TensorDict.*CatTensors"),
    "achieved goals that are fractions, with integer desired goals": (INTEGERS_AND_HALVES, ValueError,
        r"Achieved goals are torch\.float32 and desired goals torch\.int64.*goal_fn|Goals are torch\.int64, but"),
    "achieved goals of two shapes": (changed(wider, NEXT_ACHIEVED), ValueError,
        r"achieved goal has the shape \(10, 2\) at the root and \(10, 3\) under 'next'"),
    "desired goals of two shapes": (changed(wider, NEXT_DESIRED), ValueError,
        r"desired goal has the shape \(10, 2\) at the root and \(10, 3\) under 'next'"),
    "achieved goals of two dtypes": (changed(torch.Tensor.double, NEXT_ACHIEVED), ValueError,
        r"achieved goal is torch\.float32 at the root and torch\.float64 under"),
    "achieved goals unlike desired goals": (changed(wider, *ACHIEVED_GOALS), ValueError,
        r"achieved goal has the shape \(3,\) and a desired goal \(2,\).*goal_fn"),
    "a NaN goal": (with_nan(7), ValueError, "achieved goal of transition 7 of this write is NaN"),
    "a NaN goal in the last row": (with_nan(-1), ValueError, "achieved goal of transition 9 of this write is NaN"),
    "a NaN goal in one of two lanes": (both(with_nan(7), lambda data: data.reshape(2, 5)), ValueError,
        "transition 7 of this write is NaN"),
    "a NaN in the first achieved goal": (with_nan(0, "achieved_goal"), ValueError,
        "achieved goal of transition 0 of this write is NaN"),
    "a NaN desired goal": (with_nan(3, "desired_goal"), ValueError,
        "desired goal of transition 3 of this write is NaN"),
    "a NaN next desired goal": (with_nan(9, NEXT_DESIRED), ValueError,
        "desired goal of transition 9 of this write is NaN"),
    "NaN desired goals of integer achieved goals": (
        both(changed(torch.Tensor.long, *ACHIEVED_GOALS), with_nan(3, "desired_goal")), ValueError,
        "desired goal of transition 3 of this write is NaN"),
    "goals without elements": (changed(lambda goals: goals[..., :0], *ACHIEVED_GOALS, *DESIRED_GOALS), ValueError,
        r"Goals have the shape \(0,\) and contain no number"),
    "two flags for each transition": (changed(lambda done: done.expand(-1, 2), ("next", "done")), ValueError,
        r"\('next', 'done'\) has the shape \(10, 2\) for 10 transitions"),
    "two ids for each transition": (
        set_entry(("collector", "traj_ids"), torch.zeros(10, 2, dtype=torch.int64)), ValueError,
        r"\('collector', 'traj_ids'\) has the shape \(10, 2\) for 10 transitions"),
    "n-step transitions": (set_entry("steps_to_next_obs", torch.full((10, 1), 3)), ValueError,
        r"n-step transitions.*Compose\(MultiStepTransform\("),
    "added alone, no achieved goal": (both(without("achieved_goal"), first), KeyError,
        r"no entry 'achieved_goal'.*achieved_goal_key=.*Present entries: .*desired_goal"),
    "added alone, compact observations": (both(without(NEXT_ACHIEVED, NEXT_DESIRED), first), KeyError,
        rf"\('next', 'achieved_goal'\).*{LEFT_OUT}"),
    "added alone, achieved goals unlike desired goals": (both(changed(wider, *ACHIEVED_GOALS), first), ValueError,
        r"achieved goal has the shape \(3,\) and a desired goal \(2,\).*goal_fn"),
    "added alone, achieved goals of two shapes": (both(changed(wider, NEXT_ACHIEVED), first), ValueError,
        r"\(2,\) at the root and \(3,\) under 'next'"),
    "added alone, a NaN goal": (both(with_nan(0), first), ValueError, "transition 0 of this write is NaN"),
}  # fmt: skip
BAD_WITH_OPTIONS = {  # the same, and arguments of the transform
    "a goal that goal_fn makes NaN": (NAN_AT_103, ValueError, "transition 4 of this write is NaN.*goal_fn",
        {"goal_fn": lambda state: state / (state[:, 1:] != 103)}),
    "compact, a goal that changes": (OTHER_GOAL_LATER, ValueError,
        r"CompactGoals leaves \('next', 'desired_goal'\) out, but it differs from 'desired_goal'.*Remove CompactGoals",
        {"compact": True}),
    "compact, done at the root": (set_entry("done", FOURTH), ValueError,
        r"CompactGoals leaves 'done' out, but it is True.*remove CompactGoals", {"compact": True}),
    "compact, truncated at the root": (set_entry("truncated", FOURTH), ValueError,
        r"CompactGoals leaves 'truncated' out, but it is True", {"compact": True}),
    "compact, no next desired goal": (*BAD_WRITES["no next desired goal"], {"compact": True}),
}  # fmt: skip


@pytest.mark.parametrize("good_before", [0, 1, 2])
@pytest.mark.parametrize("name", BAD_WRITES | BAD_WITH_OPTIONS)
def test_a_bad_write_is_refused_and_leaves_no_trace(name, good_before):
    bad, error, message, *options = (BAD_WRITES | BAD_WITH_OPTIONS)[name]
    check_leaves_no_trace(bad, error, message, good_before=good_before, **(options[0] if options else {}))


def test_a_nan_goal_in_double_precision_is_refused():
    check_leaves_no_trace(both(DOUBLE, with_nan(3)), ValueError, "transition 3 of this write is NaN")


@pytest.mark.parametrize("good_before", [1, 2])
def test_goals_of_another_shape_than_before_are_refused_and_leave_no_trace(good_before):
    message = r"Goals have the shape \(3,\), but goal_spec or an earlier write has \(2,\)"
    bad = changed(wider, *ACHIEVED_GOALS, *DESIRED_GOALS)
    check_leaves_no_trace(bad, ValueError, message, good_before=good_before)


def other_dtype(dtype):
    return rf"torch\.{dtype}.*torch\.float32|torch\.float32.*torch\.{dtype}"


REFUSED_OPTIONS = {  # an argument and a value with which the first write is refused
    "no mask": ("mask_key", "mask", KeyError, "no entry 'mask'.*mask_key="),
    "a key given with next": ("done_key", ("next", "done"), KeyError,
        "Pass done_key without 'next', which is added"),
    "goal_fn that returns another shape": ("goal_fn", lambda state: state[:, :1], ValueError,
        r"achieved goal has the shape \(1,\) and a desired goal \(2,\).*goal_fn"),
    "goal_fn that returns nothing": ("goal_fn", lambda state: None, TypeError,
        "goal_fn must return a tensor.*returned NoneType"),
    "goal_spec of another shape": ("goal_spec", Unbounded((3,)), ValueError,
        r"Goals have the shape \(2,\), but goal_spec or an earlier write has \(3,\)\. Pass the goal_spec"),
    "goal_spec of a batch of environments": ("goal_spec", Unbounded((4, 2)), ValueError,
        r"or an earlier write has \(4, 2\)\. .*without the batch of environments"),
    "goal_spec of a number": ("goal_spec", Unbounded(()), ValueError, r"or an earlier write has \(\)\."),
    "goal_spec of integers": ("goal_spec", Unbounded((2,), dtype=torch.int64), ValueError, other_dtype("int64")),
    "goal_spec of doubles": ("goal_spec", Unbounded((2,), dtype=torch.float64), ValueError, other_dtype("float64")),
}  # fmt: skip


@pytest.mark.parametrize("how", ["extend", "add"])
@pytest.mark.parametrize("case", REFUSED_OPTIONS)
def test_goals_and_masks_that_the_arguments_do_not_describe_are_refused(case, how):
    name, value, error, message = REFUSED_OPTIONS[case]
    rb, chunk = make_small_buffer(**{name: value}), transitions()
    check_refused(rb, lambda: rb.extend(chunk) if how == "extend" else rb.add(chunk[0]), error, message)


def test_a_goal_fn_that_loses_rows_is_refused_in_any_write():
    rb = make_small_buffer(goal_fn=lambda state: state[:10])
    rb.extend(transitions())
    message = r"goal_fn must return one goal per row, .*\(10, 2\) for 15 rows"
    check_refused(rb, lambda: rb.extend(transitions(10, 15)), ValueError, message)


@tensorclass
class Transitions:
    achieved_goal: torch.Tensor
    desired_goal: torch.Tensor
    next: TensorDict


def test_a_tensorclass_is_refused_with_the_remedy():
    rb = ReplayBuffer(storage=LazyTensorStorage(100), transform=HERTransform(distance))
    written = Transitions.from_tensordict(transitions())
    check_refused(rb, lambda: rb.extend(written), TypeError, "must be a TensorDict, got a Transitions.*to_tensordict")
    rb.extend(written.to_tensordict())
    assert len(rb) == 10


# Writes that are not refused


@pytest.mark.parametrize("before", [[], [lambda: MultiStepTransform(3, 0.9)]], ids=["one step", "three steps"])
@pytest.mark.parametrize("compact", [False, True])
def test_an_empty_write_changes_nothing(compact, before):
    rb = make_small_buffer(before=before, compact=compact)
    rb.extend(transitions())
    state = state_of(rb)
    rb.extend(transitions()[:0])
    assert same(state_of(rb), state)
    rb.extend(transitions(10))
    assert len(rb) > 10


def test_a_list_of_transitions_is_a_write(monkeypatch):
    monkeypatch.setattr("secrets.randbelow", lambda limit: 0)  # the same episode ids in both tables
    rb, twin = (ReplayBuffer(storage=LazyTensorStorage(100), transform=HERTransform(distance)) for _ in range(2))
    for start in (0, 10, 20):
        rb.extend(list(transitions(start).unbind(0)))
        twin.extend(transitions(start))
    assert same(state_of(rb), state_of(twin))


def test_achieved_goals_that_are_integers_in_float_dtype_are_accepted():
    rb = make_small_buffer(her_ratio=1.0)
    rb.extend(changed(torch.Tensor.long, *DESIRED_GOALS)(transitions(count=25)))
    batch = rb.sample(50)
    assert batch["desired_goal"].dtype == torch.int64
    assert (batch["desired_goal"][:, 1] > batch["achieved_goal"][:, 1]).all()


PADDING = {
    "NaN": {NEXT_ACHIEVED: math.nan},
    "an end at the origin": {NEXT_ACHIEVED: 0.0, NEXT_DESIRED: 0.0, ("next", "done"): True},
}


@pytest.mark.parametrize("name", PADDING)
def test_padding_may_have_any_values(name):
    rb = make_small_buffer(mask_key="mask")
    chunk = transitions().set("mask", torch.arange(10) < 8)
    chunk["observation"], chunk["next", "observation"] = torch.ones(10, 3), torch.zeros(10, 3)
    for key, value in PADDING[name].items():
        chunk[key][9] = value
    rb.extend(chunk)
    assert len(rb) == 10


# Lost final observations


def test_a_vectorized_environment_that_forgets_last_steps_is_refused():
    rb = make_small_buffer(size=1000)
    data = VectorizedInProcess(POINT_REACH, num_envs=4).rollout(60, break_when_any_done=False)
    rb.extend(data[:, :40].reshape(-1))
    later = data[:, 40:].reshape(-1)
    check_refused(rb, lambda: rb.extend(later), ValueError, "the environment dropped it, .*SerialEnv")


LAST_STEPS = {  # the desired goal at the last step, other observations after it, and whether the write is refused
    "lost": (1e-30, {"observation": 0.0}, True),
    "a goal at the origin": (0.0, {"observation": 0.0}, False),
    "a new goal, at the origin": (1.0, {"observation": 0.0, "velocity": 1e-30}, False),
    "nothing else is observed": (1.0, {}, False),
}


@pytest.mark.parametrize("case", LAST_STEPS)
def test_an_episode_that_ends_at_the_origin_is_refused_if_its_last_step_is_lost(case):
    goal, observed, refused = LAST_STEPS[case]
    rb, chunk = make_small_buffer(her_ratio=1.0), changed(torch.zeros_like, *DESIRED_GOALS)(transitions(count=25))
    chunk[NEXT_ACHIEVED][-1] = 0.0
    chunk["next", "reward"] = distance(chunk[NEXT_ACHIEVED], chunk["desired_goal"])[:, None]
    chunk["desired_goal"][-1, 0] = goal
    for name, value in observed.items():
        chunk[name], chunk["next", name] = torch.ones(25, 3), torch.full((25, 3), value)
    if refused:
        check_refused(rb, lambda: rb.extend(chunk), ValueError, "the environment dropped it, .*SerialEnv")
    else:
        rb.extend(chunk)
        assert rb[:]["hindsight", "relabelled"][-1]


# Arguments

NO_WHOLE_NUMBER = [0, -1, 2.5, 1e6, math.nan, "10", True]
BAD_ARGUMENTS = [  # the argument, its values, the error and its message, in which {} is the value
    ("her_ratio", [-0.1, 1.0001, 4, math.nan, math.inf, -math.inf, "0.8", None], ValueError,
        r"her_ratio .*in \[0, 1\], got {}\..*k / \(k \+ 1\)"),
    ("strategy", ["futur", "", "Futures", "future "], ValueError,
        "Unknown strategy {}: use one of 'current', 'future', .*, or a GoalStrategy"),
    ("strategy", [Future, None, 3], TypeError, r"a GoalStrategy, got {}.*strategy=Future\(\)"),
    *[(name, values, ValueError, name + " must be an integer of at least 1, got {}")
        for name, values in (("capacity", [*NO_WHOLE_NUMBER, None]), ("max_episode_steps", NO_WHOLE_NUMBER),
                             ("sequence_length", NO_WHOLE_NUMBER))],
    ("achieved_goal_key", ["desired_goal", ("desired_goal",)], ValueError,
        "achieved_goal_key and desired_goal_key must differ, got 'desired_goal' for both"),
    ("goal_fn", [5, "achieved"], TypeError, "goal_fn must be a function.*got {}"),
    ("goal_spec", [Composite(achieved_goal=Unbounded(2)), (2,)], TypeError,
        r'spec of one goal, got a .*env\.observation_spec\["achieved_goal"\]'),
    ("reward", [None, 0.05, "sparse"], TypeError,
        r"must be a function of \(achieved_goal, desired_goal\), got {}"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [(name, value, error, message) for name, values, error, message in BAD_ARGUMENTS for value in values],
)
def test_a_bad_argument_is_refused(name, value, error, message):
    with pytest.raises(error, match=message.replace("{}", re.escape(repr(value)))):
        HERTransform(**({"reward": distance} | {name: value}))


def test_the_state_of_a_transform_with_another_capacity_is_refused_and_changes_nothing():
    rb = make_small_buffer()
    rb.extend(transitions(count=30))
    state = rb.transform[0].state_dict()
    for count in (0, 10):
        other = make_small_buffer(capacity=50)
        if count:
            other.extend(transitions(count=count))
        check_refused(other, lambda: other.transform[0].load_state_dict(state), ValueError, "capacity=100")  # noqa: B023


# Buffers that processes share


@pytest.mark.parametrize(
    "share",
    [
        lambda transform: transform.share_memory_(),
        lambda transform: TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=transform, shared=True),
    ],
)
def test_a_shared_buffer_without_goal_spec_is_refused(share):
    with pytest.raises(RuntimeError, match=r'goal_spec=env\.observation_spec\["achieved_goal"\]'):
        share(HERTransform(distance, capacity=100))


def test_a_shared_transform_with_goal_spec_or_data_is_not_refused():
    assert HERTransform(distance, capacity=100, goal_spec=Unbounded(2)).share_memory_().table.is_shared
    rb = make_small_buffer()
    rb.extend(transitions())
    assert rb.transform[0].share_memory_().table.is_shared


# Use as a transform of an environment

USES = {
    "alone": lambda env, transform: TransformedEnv(env, transform),
    "in a Compose": lambda env, transform: TransformedEnv(env, Compose(StepCounter(), transform)),
    "in nested Composes": lambda env, transform: TransformedEnv(env, Compose(StepCounter(), Compose(transform))),
    "appended": lambda env, transform: env.append_transform(transform),
    "appended to a transform": lambda env, transform: TransformedEnv(env, StepCounter()).append_transform(transform),
    "inserted": lambda env, transform: TransformedEnv(env, Compose(StepCounter())).insert_transform(0, transform),
}


@pytest.mark.parametrize("kind", [HERTransform, HindsightAugmentation])
@pytest.mark.parametrize("use", USES)
def test_a_transform_that_an_environment_refuses_can_be_given_to_a_buffer(use, kind):
    transform = kind(distance)
    with pytest.raises(ValueError, match=rf"cannot be a transform of an environment: .*transform={kind.__name__}"):
        USES[use](GymEnv(POINT_REACH), transform)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=transform)
    rb.extend(transitions(count=25))
    assert rb.sample(50)["hindsight", "relabelled"].any()


def test_sampling_transitions_that_were_written_before_the_transform_was_added_is_refused():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100))
    rb.extend(transitions())
    rb.append_transform(HERTransform(distance, capacity=100))
    message = r"no stamp.*written before HERTransform.*transform=HERTransform\(\.\.\.\)"
    check_refused(rb, lambda: rb.sample(5), KeyError, message)


@pytest.mark.parametrize("count", [1, 10, 11])
def test_a_sample_that_is_not_made_of_whole_sequences_is_refused(count):
    rb = make_small_buffer(sequence_length=4)
    rb.extend(transitions(count=25))
    message = f"batch has {count} transitions, .* multiple of sequence_length=4.*slice length of the sampler"
    check_refused(rb, lambda: rb.sample(count), ValueError, message)
    assert len(rb.sample(12)) == 12
