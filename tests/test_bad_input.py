"""Bad input is a clear error at the earliest moment, and leaves the buffer as it was.

Bad writes are tried between good ones: afterwards the buffer is compared with a twin that never saw the bad one.
"""

import copy
import gc
import math
import re
import warnings
from functools import partial

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, tensorclass
from tensordict.nn import TensorDictModule
from torchrl.data import Composite, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer, Unbounded
from torchrl.envs import (
    Compose,
    DTypeCastTransform,
    GymEnv,
    MultiStepTransform,
    ObservationNorm,
    Reward2GoTransform,
    RewardScaling,
    SelectTransform,
    StepCounter,
    TransformedEnv,
)

import torchrl_her.envs  # noqa: F401  # registers PointReach
from torchrl_her import Future, GoalReward, HERTransform, SparseReward

NEXT_ACHIEVED = ("next", "achieved_goal")
NEXT_DESIRED = ("next", "desired_goal")


def distance(achieved, desired):
    return (achieved - desired).norm(dim=-1)


def transitions(first=0, count=10, length=25):
    """Consecutive transitions of episodes of that many steps, with goals of two numbers: [count]."""
    time = torch.arange(first, first + count)
    episode, step = (time // length)[:, None], (time % length)[:, None]
    achieved = torch.cat([episode, step], dim=1).float()
    desired = -1 - torch.cat([episode, episode], dim=1).float()
    done = step == length - 1
    outcome = achieved + torch.tensor([0.0, 1.0])
    return TensorDict(
        {
            "achieved_goal": achieved,
            "desired_goal": desired,
            "next": {
                "achieved_goal": outcome,
                "desired_goal": desired.clone(),
                "reward": distance(outcome, desired)[:, None],
                "done": done,
                "terminated": torch.zeros_like(done),
                "truncated": done.clone(),
            },
        },
        batch_size=count,
    )


@tensorclass
class Transitions:
    achieved_goal: torch.Tensor
    desired_goal: torch.Tensor
    next: TensorDict


@pytest.fixture(autouse=True)
def the_same_ids_in_all_tables(monkeypatch):
    """So that the states of two buffers can be compared."""
    monkeypatch.setattr("secrets.randbelow", lambda limit: 0)


def make_buffer(reward=distance, *, before=(), after=(), max_size=100, **options):
    transform = HERTransform(reward, capacity=options.pop("capacity", max_size), **options)
    transforms = [*(make() for make in before), transform, *(make() for make in after)]
    return TensorDictReplayBuffer(storage=LazyTensorStorage(max_size), transform=Compose(*transforms))


def same(one, other):
    """Whether nested states are equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (torch.Tensor, TensorDictBase)):
        return one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return one == other


def state_of(rb):
    """What a buffer holds and where it stands, transform included; memory not written to yet is left out."""
    state = {part: value for part, value in rb.state_dict().items() if part != "_storage"}
    return copy.deepcopy(state | {"stored": rb.storage[:] if len(rb) else None})


def is_refused(rb, action, error, message):
    """Check that an action raises an error and changes nothing: storage, writer, sampler and transform."""
    before, size = state_of(rb), len(rb)
    with pytest.raises(error, match=message):
        action()
    assert len(rb) == size
    assert same(state_of(rb), before)


def is_as_if_never_written(bad, error, message, make=make_buffer, good_before=0):
    """Check that a bad write after some good ones is refused, and that what follows goes on as without it.

    ``bad`` makes a bad write of the next good one.
    """
    rb, twin = make(), make()
    good = [transitions(first) for first in (0, 10, 20)]  # an episode ends within the last
    for chunk in good[:good_before]:
        rb.extend(chunk.clone())
        twin.extend(chunk.clone())
    spoiled = bad(good[good_before].clone())
    write = rb.extend if spoiled.ndim else rb.add
    is_refused(rb, lambda: write(spoiled), error, message)
    for chunk in good[good_before:]:
        rb.extend(chunk.clone())
        twin.extend(chunk.clone())
    assert same(state_of(rb), state_of(twin))
    samples = []
    for each in (rb, twin):
        torch.manual_seed(0)
        samples.append(each.sample(50))
    assert same(*samples)
    assert samples[0]["hindsight", "relabelled"].any()


def without(*keys):
    return lambda tensordict: tensordict.exclude(*keys)


def with_entry(key, change):
    """A write in which one entry is another."""
    return lambda tensordict: tensordict.set(key, change(tensordict.get(key)))


def with_entries(keys, change):
    def spoil(tensordict):
        for key in keys:
            tensordict.set(key, change(tensordict.get(key)))
        return tensordict

    return spoil


def with_nan(key, row):
    def spoil(tensordict):
        tensordict[key][row, 1] = math.nan
        return tensordict

    return spoil


def wider(goals):
    """Goals of three numbers: [n, 3]."""
    return torch.nn.functional.pad(goals, (0, 1))


ALL_GOALS = ["achieved_goal", "desired_goal", NEXT_ACHIEVED, NEXT_DESIRED]
COMPACT = r"compact_obs=True leaves it out \(use False\), and so does NextObservationDelta"
BAD_WRITES = {
    "no achieved goal": (
        without("achieved_goal"),
        KeyError,
        r"no entry 'achieved_goal'.*achieved_goal_key=.*there are .*desired_goal",
    ),
    "no desired goal": (
        without("desired_goal"),
        KeyError,
        r"no entry 'desired_goal'.*desired_goal_key=.*there are .*achieved_goal",
    ),
    "no achieved goal anywhere": (
        without("achieved_goal", NEXT_ACHIEVED),
        KeyError,
        r"no entry 'achieved_goal'.*achieved_goal_key=",
    ),
    "no next achieved goal": (without(NEXT_ACHIEVED), KeyError, rf"\('next', 'achieved_goal'\).*{COMPACT}"),
    "no next desired goal": (without(NEXT_DESIRED), KeyError, rf"\('next', 'desired_goal'\).*{COMPACT}"),
    "compact observations": (
        without(NEXT_ACHIEVED, NEXT_DESIRED),
        KeyError,
        rf"\('next', 'achieved_goal'\).*{COMPACT}",
    ),
    "a goal in parts": (
        with_entries(ALL_GOALS, lambda goals: TensorDict(x=goals[..., 0], batch_size=goals.shape[:-1])),
        TypeError,
        "'achieved_goal' is a TensorDict, and one tensor is needed.*CatTensors",
    ),
    "achieved goals between the integers of desired ones": (
        lambda chunk: with_entries(["desired_goal", NEXT_DESIRED], torch.Tensor.long)(
            with_entries(["achieved_goal", NEXT_ACHIEVED], lambda goals: goals + 0.5)(chunk)
        ),
        ValueError,
        r"Achieved goals are torch\.float32 and desired ones torch\.int64.*goal_fn|Goals are torch\.int64, and",
    ),
    "no done": (without(("next", "done")), KeyError, r"\('next', 'done'\).*done_key="),
    "achieved goals of two shapes": (
        with_entry(NEXT_ACHIEVED, wider),
        ValueError,
        r"achieved goal has the shape \(10, 2\) at the root and \(10, 3\) under 'next'",
    ),
    "desired goals of two shapes": (
        with_entry(NEXT_DESIRED, wider),
        ValueError,
        r"desired goal has the shape \(10, 2\) at the root and \(10, 3\) under 'next'",
    ),
    "achieved goals unlike desired goals": (
        with_entries(["achieved_goal", NEXT_ACHIEVED], wider),
        ValueError,
        r"achieved goal has the shape \(3,\) and one desired goal \(2,\).*goal_fn",
    ),
    "a NaN goal": (with_nan(NEXT_ACHIEVED, 7), ValueError, "achieved goal of transition 7 of this write is NaN"),
    "a NaN goal at last": (
        with_nan(NEXT_ACHIEVED, -1),
        ValueError,
        "achieved goal of transition 9 of this write is NaN",
    ),
    "two flags for each transition": (
        with_entry(("next", "done"), lambda done: done.expand(-1, 2)),
        ValueError,
        r"\('next', 'done'\) has the shape \(10, 2\) for 10 transitions",
    ),
    "two ids for each transition": (
        lambda tensordict: tensordict.set(("collector", "traj_ids"), torch.zeros(10, 2, dtype=torch.int64)),
        ValueError,
        r"\('collector', 'traj_ids'\) has the shape \(10, 2\) for 10 transitions",
    ),
    "n-step transitions": (
        lambda tensordict: tensordict.set("steps_to_next_obs", torch.full((10, 1), 3)),
        ValueError,
        r"n-step transitions.*Compose\(MultiStepTransform\(",
    ),
}


@pytest.mark.parametrize("good_before", [0, 1, 2])
@pytest.mark.parametrize("name", BAD_WRITES)
def test_a_bad_write_is_refused_and_leaves_no_trace(name, good_before):
    is_as_if_never_written(*BAD_WRITES[name], good_before=good_before)


ONE_BAD_WRITE = {
    "no achieved goal": BAD_WRITES["no achieved goal"],
    "compact observations": BAD_WRITES["compact observations"],
    "achieved goals unlike desired goals": BAD_WRITES["achieved goals unlike desired goals"],
    "achieved goals of two shapes": (
        with_entry(NEXT_ACHIEVED, wider),
        ValueError,
        r"\(10, 2\) at the root and \(10, 3\) under 'next'|\(2,\) at the root and \(3,\) under 'next'",
    ),
    "a NaN goal": (with_nan(NEXT_ACHIEVED, 0), ValueError, "transition 0 of this write is NaN"),
}


@pytest.mark.parametrize("good_before", [0, 1])
@pytest.mark.parametrize("name", ONE_BAD_WRITE)
def test_a_bad_transition_that_is_added_alone_is_refused_and_leaves_no_trace(name, good_before):
    bad, error, message = ONE_BAD_WRITE[name]
    is_as_if_never_written(lambda chunk: bad(chunk)[0], error, message, good_before=good_before)


def compact_buffer():
    return make_buffer(compact=True)


def with_root_flag(key):
    return lambda tensordict: tensordict.set(key, torch.arange(10)[:, None] == 4)


@pytest.mark.parametrize("good_before", [0, 1])
@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (with_entry(NEXT_DESIRED, lambda goals: goals - (torch.arange(10) == 7)[:, None].float()), ValueError,
         r"compact=True leaves \('next', 'desired_goal'\) out, and it differs from 'desired_goal'.*compact=False"),
        (with_root_flag("done"), ValueError, r"compact=True leaves 'done' out, and it is True.*compact=False"),
        (with_root_flag("truncated"), ValueError, r"compact=True leaves 'truncated' out, and it is True"),
        BAD_WRITES["no next desired goal"],
    ],
)  # fmt: skip
def test_a_write_that_says_more_than_compact_keeps_is_refused_and_leaves_no_trace(bad, error, message, good_before):
    is_as_if_never_written(bad, error, message, compact_buffer, good_before=good_before)


@pytest.mark.parametrize("good_before", [1, 2])
def test_goals_of_another_shape_than_before_are_refused_and_leave_no_trace(good_before):
    message = r"One goal has the shape \(3,\), and goal_spec, or the first write, \(2,\)"
    is_as_if_never_written(with_entries(ALL_GOALS, wider), ValueError, message, good_before=good_before)


def test_lanes_with_a_bad_transition_are_refused_as_a_whole():
    spoil = BAD_WRITES["a NaN goal"][0]
    message = "transition 7 of this write is NaN"
    is_as_if_never_written(lambda chunk: spoil(chunk).reshape(2, 5), ValueError, message, good_before=1)


def test_a_nan_goal_in_double_precision_is_refused():
    spoil = with_entries(ALL_GOALS, torch.Tensor.double)
    nan = with_nan(NEXT_ACHIEVED, 3)
    is_as_if_never_written(lambda chunk: nan(spoil(chunk)), ValueError, "transition 3 of this write is NaN")


def test_a_goal_that_goal_fn_makes_nan_is_refused():
    def make():
        return make_buffer(goal_fn=lambda state: state / (state[:, 1:] != 103))

    def reach_103(chunk):
        chunk[NEXT_ACHIEVED][4] = torch.tensor([0.0, 103.0])
        return chunk

    message = "transition 4 of this write is NaN.*goal_fn"
    with_zero = with_entry(NEXT_ACHIEVED, lambda goals: goals * torch.tensor([0.0, 1.0]))
    is_as_if_never_written(lambda chunk: reach_103(with_zero(chunk)), ValueError, message, make, good_before=1)


def test_a_nan_in_padding_is_not_refused():
    rb = make_buffer(mask_key="mask")
    chunk = transitions().set("mask", torch.arange(10) < 8)
    chunk[NEXT_ACHIEVED][9] = math.nan
    rb.extend(chunk)
    assert len(rb) == 10


@pytest.mark.parametrize("before", [[], [lambda: MultiStepTransform(3, 0.9)]], ids=["one step", "three steps"])
@pytest.mark.parametrize("compact", [False, True])
def test_an_empty_write_changes_nothing(compact, before):
    rb = make_buffer(before=before, compact=compact)
    rb.extend(transitions())
    state = state_of(rb)
    rb.extend(transitions()[:0])
    assert same(state_of(rb), state)
    rb.extend(transitions(10))
    assert len(rb) > 10


def test_a_tensorclass_is_refused_with_the_way_to_go():
    rb = ReplayBuffer(storage=LazyTensorStorage(100), transform=HERTransform(distance))
    written = Transitions.from_tensordict(transitions())
    is_refused(rb, lambda: rb.extend(written), TypeError, "a Transitions takes none: .*its to_tensordict")
    rb.extend(written.to_tensordict())
    assert len(rb) == 10


def test_a_list_of_transitions_is_a_write():
    rb, twin = (ReplayBuffer(storage=LazyTensorStorage(100), transform=HERTransform(distance)) for _ in range(2))
    for first in (0, 10, 20):
        rb.extend(list(transitions(first).unbind(0)))
        twin.extend(transitions(first))
    assert same(state_of(rb), state_of(twin))


def test_whole_numbers_that_are_stored_as_real_ones_are_goals_among_integers():
    rb = make_buffer(her_ratio=1.0)
    chunk = transitions(count=25)
    for key in ("desired_goal", NEXT_DESIRED):
        chunk[key] = chunk[key].long()
    rb.extend(chunk)
    batch = rb.sample(50)
    assert batch["desired_goal"].dtype == torch.int64
    assert (batch["desired_goal"][:, 1] > batch["achieved_goal"][:, 1]).all()


@pytest.mark.parametrize("taken", ["desired_goal", ("next", "reward")])
def test_a_sample_without_what_relabelling_replaces_is_refused(taken):
    kept = [key for key in transitions().keys(True, True) if key != taken]
    rb = make_buffer(before=[partial(SelectTransform, *kept, "hindsight_stamp", keep_rewards=False)])
    rb.extend(transitions(count=25))
    with pytest.raises(KeyError, match="in what is sampled, and it was written: list the transform that takes it away"):
        rb.sample(5)


def test_padding_that_ends_at_the_origin_is_not_refused():
    rb = make_buffer(mask_key="mask")
    chunk = transitions().set("mask", torch.arange(10) < 8)
    chunk["observation"] = torch.ones(10, 3)
    chunk["next", "observation"] = torch.zeros(10, 3)
    chunk["next", "done"][9] = True
    for key in (NEXT_ACHIEVED, NEXT_DESIRED):
        chunk[key][9] = 0.0
    rb.extend(chunk)
    assert len(rb) == 10


def test_a_missing_mask_is_refused():
    rb = make_buffer(mask_key="mask")
    is_refused(rb, lambda: rb.extend(transitions()), KeyError, "no entry 'mask'.*mask_key=")


def test_goals_that_goal_fn_gives_another_shape_are_refused():
    rb = make_buffer(goal_fn=lambda state: state[:, :1])
    message = r"achieved goal has the shape \(1,\) and one desired goal \(2,\).*goal_fn"
    is_refused(rb, lambda: rb.extend(transitions()), ValueError, message)


def test_a_goal_fn_that_loses_rows_is_refused_in_any_write():
    rb = make_buffer(goal_fn=lambda state: state[:10])
    rb.extend(transitions())
    is_refused(rb, lambda: rb.extend(transitions(10, 15)), ValueError, r"goal_fn returned .*\(10, 2\) for 15 rows")


@pytest.mark.parametrize("goal_fn", [5, "achieved"])
def test_a_goal_fn_that_is_no_function_is_refused(goal_fn):
    with pytest.raises(TypeError, match=f"goal_fn must be a function.*got {goal_fn!r}"):
        make_buffer(goal_fn=goal_fn)


def test_a_goal_fn_that_returns_nothing_is_refused():
    rb = make_buffer(goal_fn=lambda state: None)
    is_refused(rb, lambda: rb.extend(transitions()), TypeError, "goal_fn must return a tensor.*returned NoneType")


# Rewards


def test_a_reward_function_that_returns_nothing_is_refused():
    rb = make_buffer(lambda achieved, desired: None)
    is_refused(rb, lambda: rb.extend(transitions()), TypeError, "returned None: it must return one value per row")


WRONG_REWARDS = {
    "of all pairs": (lambda achieved, desired: (achieved[:, None] - desired[None]).norm(dim=-1), ""),
    "one for all": (lambda achieved, desired: (achieved - desired).norm(), r"\(\)"),
    "one for all, as a list of one": (lambda achieved, desired: (achieved - desired).norm()[None], ""),
    "one for each number": (lambda achieved, desired: achieved - desired, r"\(\d+, 2\)"),
}


@pytest.mark.parametrize("how", ["extend", "add"])
@pytest.mark.parametrize("name", WRONG_REWARDS)
def test_a_reward_function_that_returns_the_wrong_shape_is_refused_at_the_first_write(name, how):
    reward_fn, shape = WRONG_REWARDS[name]
    rb = make_buffer(reward_fn)
    message = rf"\('next', 'reward'\) returned the shape {shape}.*one value per row.*dim=-1"
    chunk = transitions()
    is_refused(rb, lambda: rb.extend(chunk) if how == "extend" else rb.add(chunk[0]), ValueError, message)


@pytest.mark.parametrize("name", WRONG_REWARDS)
def test_a_termination_function_that_returns_the_wrong_shape_is_refused_at_the_first_write(name):
    values, shape = WRONG_REWARDS[name]
    rb = make_buffer(SparseReward(0.1, terminated_fn=lambda achieved, desired: values(achieved, desired) < 1))
    message = rf"\('next', 'terminated'\) returned the shape {shape}.*one value per row"
    is_refused(rb, lambda: rb.extend(transitions()), ValueError, message)


@pytest.mark.parametrize(
    "function",
    [
        lambda achieved, desired: distance(achieved, desired),  # [n] where [n, 1] is stored
        lambda achieved, desired: achieved - desired,
        lambda achieved, desired: (achieved[:, None] - desired[None]).norm(dim=-1),
    ],
)
def test_a_module_that_writes_rewards_of_the_wrong_shape_is_refused_at_the_first_write(function):
    rb = make_buffer(TensorDictModule(function, [NEXT_ACHIEVED, "desired_goal"], [("next", "reward")]))
    message = r"shape .*under \('next', 'reward'\) where rewards of the shape \(\d+, 1\) are stored"
    is_refused(rb, lambda: rb.extend(transitions()), ValueError, message)


def test_rewards_that_are_stored_in_another_shape_than_recomputed_are_refused_at_the_first_write():
    without_last = with_entry(("next", "reward"), lambda reward: reward[:, 0])
    message = r"shape .*under \('next', 'reward'\) where rewards of the shape \(\d+,\) are stored"
    is_as_if_never_written(without_last, ValueError, message)


@pytest.mark.parametrize(
    ("entry", "message"),
    [("reward", r"\('next', 'reward'\).*reward_key="), ("terminated", r"\('next', 'terminated'\).*done_key=")],
)
def test_an_entry_that_relabelling_recomputes_and_that_is_not_stored_is_refused(entry, message):
    def make():
        return make_buffer(SparseReward(0.1, terminated_fn=lambda achieved, desired: (achieved == desired).all(-1)))

    is_as_if_never_written(without(("next", entry)), KeyError, message, make)


@pytest.mark.parametrize("stored", [{}, {"terminated_fn": None}])
def test_flags_that_are_not_recomputed_may_be_missing(stored):
    rb = make_buffer(GoalReward(distance, **stored))
    rb.extend(transitions().exclude(("next", "terminated"), ("next", "truncated")))
    assert rb.sample(50)["hindsight", "relabelled"].sum() == 0  # the episode still runs
    assert len(rb) == 10


def test_an_error_of_the_reward_is_that_error_at_the_first_write():
    def reward_fn(achieved, desired):
        raise RuntimeError("no reward today")

    rb = make_buffer(reward_fn)
    is_refused(rb, lambda: rb.extend(transitions()), RuntimeError, "no reward today")


WRONG_ARGUMENTS = {
    "one": lambda achieved: achieved,
    "three": lambda achieved, desired, info: achieved,
    "none": lambda: 0,
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
@pytest.mark.parametrize(
    ("make", "called"),
    [
        (HERTransform, "the reward function"),
        (GoalReward, "the reward function"),
        (lambda function: GoalReward(distance, terminated_fn=function), "terminated_fn"),
        (lambda function: SparseReward(0.1, terminated_fn=function), "terminated_fn"),
    ],
    ids=["HERTransform", "GoalReward", "terminated_fn", "SparseReward"],
)
def test_a_function_with_another_number_of_arguments_is_refused(make, called, name):
    function = WRONG_ARGUMENTS[name]
    message = rf"{called} is called with two arguments, \(achieved_goal, desired_goal\), and takes \(.*TensorDictModule"
    with pytest.raises(TypeError, match=message):
        make(function)


@pytest.mark.parametrize("function", [lambda *goals: goals[0], lambda achieved, desired, scale=1.0: achieved, max])
def test_a_function_that_can_be_called_with_two_arguments_is_not_refused(function):
    HERTransform(function)


@pytest.mark.parametrize("reward", [None, 0.05, "sparse"])
def test_a_reward_that_is_no_function_is_refused(reward):
    with pytest.raises(TypeError, match=rf"must be a function of \(achieved_goal, desired_goal\), got {reward!r}"):
        HERTransform(reward)


def test_a_module_that_writes_no_reward_is_refused():
    module = TensorDictModule(distance, [NEXT_ACHIEVED, "desired_goal"], ["reward"])
    with pytest.raises(ValueError, match=r"writes \['reward'\] and not \('next', 'reward'\).*reward_key="):
        HERTransform(module)


# Arguments


@pytest.mark.parametrize("her_ratio", [-0.1, 1.0001, 4, math.nan, math.inf, -math.inf, "0.8", None])
def test_a_her_ratio_that_is_no_probability_is_refused(her_ratio):
    with pytest.raises(ValueError, match=rf"her_ratio .*in \[0, 1\], got {her_ratio!r}\..*k / \(k \+ 1\)"):
        HERTransform(distance, her_ratio=her_ratio)


@pytest.mark.parametrize("strategy", ["futur", "", "Future", "future "])
def test_an_unknown_strategy_is_refused_with_a_list_of_the_known_ones(strategy):
    message = rf"Unknown strategy {strategy!r}: use one of 'future', 'final', 'episode', 'random', or a GoalStrategy"
    with pytest.raises(ValueError, match=message):
        HERTransform(distance, strategy=strategy)


@pytest.mark.parametrize("strategy", [Future, None, 3])
def test_a_strategy_that_is_neither_a_name_nor_an_object_is_refused(strategy):
    with pytest.raises(TypeError, match=rf"a GoalStrategy, got {re.escape(repr(strategy))}.*strategy=Future\(\)"):
        HERTransform(distance, strategy=strategy)


@pytest.mark.parametrize("value", [0, -1, 2.5, 1e6, math.nan, "10", True, None])
@pytest.mark.parametrize("name", ["capacity", "max_episode_steps", "sequence_length"])
def test_a_number_that_is_not_whole_or_below_one_is_refused(name, value):
    if value is None and name != "capacity":
        return  # the default
    with pytest.raises(ValueError, match=rf"{name} must be a whole number of at least 1, got {value!r}"):
        HERTransform(distance, **{name: value})


# Where the transform stands

MISPLACED = "cannot be a transform of an environment: .*ReplayBuffer\\(transform=HERTransform"


def make_env():
    return GymEnv("torchrl_her/PointReach-v0")


@pytest.mark.parametrize(
    "use",
    [
        lambda transform: TransformedEnv(make_env(), transform),
        lambda transform: TransformedEnv(make_env(), Compose(StepCounter(), transform)),
        lambda transform: TransformedEnv(make_env(), Compose(StepCounter(), Compose(transform))),
        lambda transform: make_env().append_transform(transform),
        lambda transform: TransformedEnv(make_env(), StepCounter()).append_transform(transform),
        lambda transform: TransformedEnv(make_env(), Compose(StepCounter())).insert_transform(0, transform),
    ],
    ids=["alone", "in a Compose", "in nested Composes", "appended", "appended to a transform", "inserted"],
)
def test_use_as_a_transform_of_an_environment_is_refused(use):
    with pytest.raises(ValueError, match=MISPLACED):
        use(HERTransform(distance))


def test_a_transform_that_an_environment_refused_can_be_given_to_a_buffer():
    transform = HERTransform(distance, capacity=100)
    with pytest.raises(ValueError, match=MISPLACED):
        TransformedEnv(make_env(), transform)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=transform)
    rb.extend(transitions(count=25))
    assert rb.sample(50)["hindsight", "relabelled"].any()


def test_sampling_transitions_that_were_written_before_the_transform_was_there_is_refused():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100))
    rb.extend(transitions())
    rb.append_transform(HERTransform(distance, capacity=100))
    stored = rb.storage[:].clone()
    with pytest.raises(KeyError, match=r"no stamp.*written before HERTransform.*transform=HERTransform\(\.\.\.\)"):
        rb.sample(5)
    assert len(rb) == 10
    assert same(rb.storage[:], stored)


def scale_rewards():
    return RewardScaling(loc=0.0, scale=2.0, in_keys=[("next", "reward")])


def scale_goals():
    return RewardScaling(loc=0.0, scale=2.0, in_keys=["desired_goal"])


def cast_rewards():
    return DTypeCastTransform(torch.float32, torch.float64, in_keys=[("next", "reward")])


def sum_rewards():
    return Reward2GoTransform(out_keys=["reward_to_go"])


def normalize_when_written():
    return ObservationNorm(0.0, 2.0, in_keys=[], out_keys=[], in_keys_inv=["desired_goal"], out_keys_inv=["raw"])


def normalize_beside_when_written():
    return ObservationNorm(0.0, 2.0, in_keys=[], out_keys=[], in_keys_inv=["scaled"], out_keys_inv=["desired_goal"])


REFUSED_BEFORE = {
    "goals that are normalized when written": (
        [normalize_when_written],
        "ObservationNorm is listed before HERTransform and writes.*desired_goal.*list it after",
    ),
    "goals that are normalized beside when written": (
        [normalize_beside_when_written],
        "ObservationNorm is listed before HERTransform and works on.*desired_goal.*list it after",
    ),
    "scaled rewards": ([scale_rewards], "RewardScaling is listed before HERTransform.*reward.*list it after"),
    "scaled goals": ([scale_goals], "RewardScaling is listed before HERTransform.*desired_goal.*list it after"),
    "scaled rewards among others": (
        [StepCounter, lambda: Compose(StepCounter(), scale_rewards())],
        "RewardScaling is listed before HERTransform.*reward.*list it after",
    ),
}


@pytest.mark.parametrize("count", [1, 10])
@pytest.mark.parametrize("name", REFUSED_BEFORE)
def test_a_transform_before_it_that_relabelling_would_undo_is_refused(name, count):
    before, message = REFUSED_BEFORE[name]
    rb = make_buffer(before=before)
    is_refused(rb, lambda: rb.extend(transitions(count=count)), ValueError, message)


@pytest.mark.parametrize("name", ["scaled rewards", "scaled goals"])
def test_a_wrong_order_is_refused_wherever_the_transform_is_nested(name):
    before, message = REFUSED_BEFORE[name]
    transform = Compose(*(make() for make in before), Compose(StepCounter(), HERTransform(distance, capacity=100)))
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=transform)
    is_refused(rb, lambda: rb.extend(transitions()), ValueError, message)


@pytest.mark.parametrize("name", ["scaled rewards", "scaled goals"])
def test_a_wrong_order_that_comes_about_later_is_refused(name):
    before, message = REFUSED_BEFORE[name]
    rb = make_buffer()
    rb.extend(transitions())
    rb.insert_transform(0, before[0]())
    is_refused(rb, lambda: rb.extend(transitions(10)), ValueError, message)


@pytest.mark.parametrize("where", ["before", "after"])
def test_rewards_that_are_summed_when_written_are_refused(where):
    rb = make_buffer(**{where: [sum_rewards]})
    is_refused(rb, lambda: rb.extend(transitions(count=25)), ValueError, "Reward2GoTransform sums.*leave it out")


def test_two_of_them_are_refused():
    rb = make_buffer(after=[lambda: HERTransform(distance, capacity=100)])
    is_refused(rb, lambda: rb.extend(transitions()), ValueError, "Two transforms would relabel.*keep one")


def test_goals_of_two_dtypes_are_refused():
    spoil = with_entry(NEXT_ACHIEVED, torch.Tensor.double)
    is_as_if_never_written(spoil, ValueError, r"achieved goal is torch\.float32 at the root and torch\.float64 under")


def test_a_key_that_is_given_with_next_is_refused():
    rb = make_buffer(done_key=("next", "done"))
    is_refused(rb, lambda: rb.extend(transitions()), KeyError, "Give done_key without 'next', which is added")


def test_n_steps_over_padding_are_refused():
    rb = make_buffer(before=[lambda: MultiStepTransform(3, 0.9)], mask_key="mask")
    chunk = transitions().set("mask", torch.ones(10, dtype=torch.bool))
    is_refused(rb, lambda: rb.extend(chunk), ValueError, "padding that mask_key='mask' marks.*split_trajs=False")


@pytest.mark.parametrize("count", [1, 10])  # n steps before the first transition comes out of a MultiStepTransform
def test_n_steps_after_it_are_refused(count):
    rb = make_buffer(after=[lambda: MultiStepTransform(3, 0.9)])
    with pytest.raises(ValueError, match=r"listed after HERTransform.*list it before"):
        rb.extend(transitions(count=count))
    assert len(rb) == 0


def test_transforms_that_relabelling_does_not_undo_are_not_refused():
    selects_all = partial(SelectTransform, "achieved_goal", "desired_goal", "next", "hindsight_stamp", "index")
    rb = make_buffer(before=[cast_rewards, selects_all], after=[scale_rewards, scale_goals], her_ratio=1.0)
    rb.extend(transitions(count=25))
    batch = rb.sample(50)
    assert batch["hindsight", "relabelled"].all()
    raw_goal = batch["desired_goal"] / 2
    expected = 2 * distance(batch[NEXT_ACHIEVED], raw_goal)[:, None]
    torch.testing.assert_close(batch["next", "reward"], expected, check_dtype=False)


@pytest.mark.parametrize("count", [1, 10, 11])
def test_a_sample_that_is_not_made_of_whole_sequences_is_refused(count):
    rb = make_buffer(sequence_length=4)
    rb.extend(transitions(count=25))
    message = f"sequence_length=4 and the sampled batch has {count} transitions.*slice length of the sampler"
    is_refused(rb, lambda: rb.sample(count), ValueError, message)
    assert len(rb.sample(12)) == 12


def test_the_order_is_not_looked_up_in_a_container_that_is_gone():
    transform = HERTransform(distance, capacity=100)
    container = Compose(transform)
    del container
    gc.collect()
    assert transform.inv(transitions()).batch_size == (10,)


# goal_spec and shared buffers


@pytest.mark.parametrize("goal_spec", [Composite(achieved_goal=Unbounded(2)), (2,)])
def test_a_goal_spec_that_is_not_that_of_one_tensor_is_refused(goal_spec):
    with pytest.raises(TypeError, match=r'spec of one goal, got a .*env\.observation_spec\["achieved_goal"\]'):
        HERTransform(distance, goal_spec=goal_spec)


def test_a_shared_buffer_without_goal_spec_is_refused():
    with pytest.raises(RuntimeError, match=r'goal_spec=env\.observation_spec\["achieved_goal"\]'):
        HERTransform(distance, capacity=100).share_memory_()
    with pytest.raises(RuntimeError, match=r'goal_spec=env\.observation_spec\["achieved_goal"\]'):
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(100), transform=HERTransform(distance, capacity=100), shared=True
        )


def test_a_shared_transform_with_goal_spec_or_data_is_not_refused():
    assert HERTransform(distance, capacity=100, goal_spec=Unbounded(2)).share_memory_().table.is_shared
    rb = make_buffer()
    rb.extend(transitions())
    assert rb.transform[0].share_memory_().table.is_shared


@pytest.mark.parametrize(
    ("goal_spec", "message"),
    [
        (Unbounded((3,)), r"One goal has the shape \(2,\), and goal_spec, or the first write, \(3,\)\. goal_spec is"),
        (Unbounded((4, 2)), r"or the first write, \(4, 2\)\. .*without the batch of environments"),
        (Unbounded(()), r"or the first write, \(\)\."),
        (Unbounded((2,), dtype=torch.int64), r"torch\.int64.*torch\.float32|torch\.float32.*torch\.int64"),
        (Unbounded((2,), dtype=torch.float64), r"torch\.float64.*torch\.float32|torch\.float32.*torch\.float64"),
    ],
    ids=["another shape", "a batch of environments", "a single number", "integers", "double precision"],
)
def test_goals_that_goal_spec_does_not_describe_are_refused(goal_spec, message):
    rb = make_buffer(goal_spec=goal_spec)
    is_refused(rb, lambda: rb.extend(transitions()), ValueError, message)


@pytest.mark.parametrize(
    ("options", "message"), [({"capacity": 50}, "capacity=100"), ({"compact": True}, "with compact=False, then load")]
)
def test_the_state_of_a_transform_with_other_arguments_is_refused_and_changes_nothing(options, message):
    rb = make_buffer()
    rb.extend(transitions(count=30))
    state = rb.transform[0].state_dict()
    for count in (0, 10):
        other = make_buffer(**options)
        if count:
            other.extend(transitions(count=count))
        is_refused(other, lambda: other.transform[0].load_state_dict(state), ValueError, message)  # noqa: B023


# Rewards of another kind


def test_a_reward_module_that_gives_other_rewards_than_are_stored_is_told_of_once():
    rb = make_buffer(lambda achieved, desired: 10 * distance(achieved, desired))
    with pytest.warns(UserWarning, match=r"gives 22\.36.* whose stored reward is 2\.236.*EnvReward\(env\)"):
        rb.extend(transitions())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb.extend(transitions(10))


def test_rewards_of_padding_are_not_compared():
    rb = make_buffer(mask_key="mask")
    chunk = transitions().set("mask", torch.arange(10) < 8)
    chunk["next", "reward"][8:] = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb.extend(chunk)


# The size of the table


def told(rb, length, writes, chunk):
    """The warnings of a stream of episodes of that length, with a sample after each write of a chunk."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for write in range(writes):
            rb.extend(transitions(write * chunk, chunk, length))
            rb.sample(256)
    return [str(each.message) for each in caught]


TOO_SMALL = r"^(\d+)% of the transitions .*capacity={}\) is too small for .* the storage.* at least (\d+)"


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_a_table_too_small_for_the_storage_is_told_of_once(strategy):
    messages = told(make_buffer(max_size=1000, capacity=250, strategy=strategy), 10, 400, 10)
    assert len(messages) == 1
    lost, enough = re.search(TOO_SMALL.format(250), messages[0]).groups()
    assert 20 <= int(lost) <= 90
    assert 250 < int(enough) <= 1000


def test_the_max_size_that_the_warning_tells_to_pass_is_enough():
    (message,) = told(make_buffer(max_size=1000, capacity=250), 10, 400, 10)
    assert "Pass the max_size of the storage" in message
    assert told(make_buffer(max_size=1000, capacity=1000), 10, 400, 10) == []


def test_a_table_that_keeps_hardly_a_goal_of_what_is_sampled_is_told_of_once():
    messages = told(make_buffer(max_size=1000, capacity=5), 5, 400, 10)
    assert len(messages) == 1
    assert re.search(r"capacity=5\) is too small for .* the storage.*max_size of the storage", messages[0])


@pytest.mark.parametrize("writes", [60, 200])
@pytest.mark.parametrize(
    ("length", "chunk", "capacity"), [(10, 10, 2000), (1, 7, 2000), (30, 20, 2000), (600, 600, 2000), (600, 50, 4000)]
)
@pytest.mark.parametrize("strategy", ["future", "random"])
def test_a_table_that_is_large_enough_is_not_told_of(strategy, length, chunk, capacity, writes):
    rb = make_buffer(max_size=2000, strategy=strategy, capacity=capacity)
    assert told(rb, length, writes, chunk) == []


def test_episodes_that_run_in_many_environments_are_not_taken_for_lost_goals():
    lanes, length, size = 80, 20, 2_000
    rb, lane = make_buffer(max_size=size), torch.arange(lanes)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for now in range(0, 1_000, 5):
            time = torch.arange(now, now + 5).unsqueeze(1) + lane  # [steps, lanes], each lane is somewhere else
            step, episode = (time % length).flatten(), (lane + lanes * (time // length)).flatten()
            start, desired = torch.stack([episode, step], 1).float(), -torch.ones(len(step), 2)
            outcome, done = start + torch.tensor([0.0, 1.0]), (step == length - 1).unsqueeze(1)
            after = {"achieved_goal": outcome, "reward": distance(outcome, desired).unsqueeze(1), "done": done}
            data = TensorDict({"achieved_goal": start, "desired_goal": desired, "next": after}, [len(step)])
            data[NEXT_DESIRED] = desired
            rb.extend(data)
            rb.sample(512)
    assert int(rb.transform[0].table.counters[1]) > size  # more episodes than the table has places


def test_padding_is_not_taken_for_lost_goals():
    rb = make_buffer(max_size=1000, mask_key="mask", her_ratio=1.0)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for first in range(0, 2400, 2):  # episodes of two steps come by the place of the episode 0
            chunk = transitions(first, 2, length=2).set("mask", torch.ones(2, dtype=torch.bool))
            rb.extend(torch.cat([chunk, chunk.apply(torch.zeros_like)]))
            rb.sample(256)


# Last steps that are lost


def test_a_vectorized_environment_that_forgets_last_steps_is_refused():
    rb = make_buffer(max_size=1000)
    env = GymEnv("torchrl_her.envs:torchrl_her/PointReach-v0", num_envs=4)  # in processes, which have to know it
    data = env.rollout(60, break_when_any_done=False)
    env.close()
    rb.extend(data[:, :40].reshape(-1))
    is_refused(
        rb, lambda: rb.extend(data[:, 40:].reshape(-1)), ValueError, "what was achieved there is lost.*SerialEnv"
    )


LAST_STEPS = {  # the goal before the last step, what else is observed after it, and whether that is refused
    "lost": (1e-30, {"observation": 0.0}, True),
    "a goal at the origin": (0.0, {"observation": 0.0}, False),
    "a new goal, at the origin": (1.0, {"observation": 0.0, "velocity": 1e-30}, False),
    "nothing else that could tell": (1.0, {}, False),
}


@pytest.mark.parametrize("case", LAST_STEPS)
def test_an_end_at_the_origin_is_refused_where_it_is_none(case):
    goal, observed, refused = LAST_STEPS[case]
    rb, chunk = make_buffer(her_ratio=1.0), transitions(count=25)
    for key in ("desired_goal", NEXT_DESIRED):
        chunk[key] = torch.zeros(25, 2)
    chunk[NEXT_ACHIEVED][-1] = 0.0
    chunk["next", "reward"] = distance(chunk[NEXT_ACHIEVED], chunk["desired_goal"])[:, None]
    chunk["desired_goal"][-1, 0] = goal
    for name, value in observed.items():
        chunk[name] = chunk["next", name] = torch.ones(25, 3)
        chunk["next", name] = torch.full((25, 3), value)
    if refused:
        is_refused(rb, lambda: rb.extend(chunk), ValueError, "what was achieved there is lost.*SerialEnv")
    else:
        rb.extend(chunk)
        assert rb[:]["hindsight", "relabelled"][-1]


def test_a_buffer_that_is_not_sampled_says_nothing():
    rb = make_buffer(max_size=1000, capacity=50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for write in range(100):
            rb.extend(transitions(10 * write, length=10))
