"""Everything that is refused: writes, data sets, orders of transforms, samples, states and arguments.

Each error names what is wrong and the remedy. What is refused changes nothing. In the tables, the words that an error
must contain are a regular expression, after the type of the error if that is not ValueError.
"""

import builtins
import math
import re
import tempfile
import types
from collections.abc import Callable
from functools import partial, reduce
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict, tensorclass
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl import envs
from torchrl.data import Composite, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer, TensorStorage, Unbounded
from torchrl.envs import Compose, GymEnv, GymWrapper, MultiStepTransform, StepCounter, TransformedEnv

from support.factories import check_refused, make_augmentation, make_transform, same, seeded_sample, state_of
from support.goals import reward_of
from support.rewards import POINT_REACH, goals_of
from support.world import Goals, World
from torchrl_her import (
    CompactGoals,
    EnvReward,
    Future,
    Geometric,
    GoalReward,
    GoalSelection,
    GoalStrategy,
    HERKeys,
    HERTransform,
    LowestDensity,
    Mixture,
    MovementPriority,
    NormalizedInputs,
    PastDesired,
    Random,
    ReachedReward,
    SparseReward,
    Subgoal,
    Uniform,
    call_transform,
    check_goal_env,
    load_minari,
    load_ogbench,
)
from torchrl_her.envs import BitFlipping, PointReach

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of data that is damaged in other ways, too

GOALS = ("achieved_goal", ("next", "achieved_goal"), "desired_goal", ("next", "desired_goal"))
ROOT_ACHIEVED, ACHIEVED, ROOT_DESIRED, DESIRED = GOALS
REWARD, DONE, TERMINATED, IDS = ("next", "reward"), ("next", "done"), ("next", "terminated"), ("collector", "traj_ids")
MASK, STAMP = ("collector", "mask"), "hindsight_stamp"
FLOATS, EPISODE = Goals(), ["go"] * 9 + ["truncated"]


def written(*plans, goals=FLOATS, count=1):
    """Return a write for each plan: transitions ``[steps]``, or ``[count, steps]`` of several environments."""
    world, writes = World(count, goals), []
    for plan in plans:
        data = world.tensordict([row for env in range(count) for row in world.play(env, plan)])
        data["kept"] = torch.ones(len(data), dtype=torch.bool)  # a mask
        writes.append(data.reshape(count, -1) if count > 1 else data)
    return writes


def split(words):
    """Return the type and the words of an error."""
    name, is_named, rest = words.partition("Error: ")
    return (getattr(builtins, name + "Error"), rest) if is_named else (ValueError, words)


# Ways to write


class Extend:
    """A buffer that is extended with transitions."""

    make = staticmethod(make_transform)
    row, n = "transition {} of this write", "10, "  # the name of a transition, and the batch size in a shape

    def __init__(self, before=(), after=(), kind=TensorDictReplayBuffer, ndim=1, **options):
        self.hindsight = self.make(**options)
        transform = Compose(*(make() for make in before), self.hindsight, *(make() for make in after))
        self.rb = kind(storage=LazyTensorStorage(1000, ndim=ndim), transform=transform)

    def good_writes(self, goals):
        return written(["go"] * 10, ["go"] * 10, ["go"] * 4 + ["truncated"] + ["go"] * 5, goals=goals)

    def write_well(self, data):
        self.rb.extend(data)

    def write(self, data, row):
        """Write transitions, of which ``row`` is damaged."""
        self.write_well(data)

    def state(self):
        return state_of(self.rb) | {"report": str(self.hindsight.report())}

    def result(self):
        """Return the stored transitions and a sample, without the numbers of the episodes."""
        return [each.exclude(STAMP) for each in (self.rb.storage[:], seeded_sample(self.rb, 50))]


class Add(Extend):
    """A buffer to which single transitions are added."""

    row, n = "transition 0 of this write", ""

    def write(self, data, row):
        self.rb.add(data[row])


class Augment(Extend):
    """A buffer with HindsightAugmentation."""

    make = staticmethod(make_augmentation)


class Rows(Extend):
    """A buffer of n-step transitions, extended with ``[environments, steps]``."""

    def __init__(self):
        super().__init__(before=[n_steps], kind=ReplayBuffer, ndim=2)

    def good_writes(self, goals):
        return written(["go"] * 5, ["go"] * 5, ["go", "go", "truncated", "go", "go"], count=4)


class Adopt(Extend):
    """A transform that adopts a data set."""

    row = "row {} of the data"

    def good_writes(self, goals):
        return super().good_writes(goals)[2:]

    def write_well(self, data):
        storage = TensorStorage(self.hindsight.adopt(data))
        self.rb = TensorDictReplayBuffer(storage=storage, transform=self.rb.transform)

    def state(self):
        return [self.hindsight.state_dict(), str(self.hindsight.report())]


WRITES, BOTH = (Extend, Add, Augment), (Extend, Augment)
ALL = (*WRITES, Adopt)

# Damages of transitions, ``[10]``


without = partial(methodcaller, "exclude")
entry = partial(methodcaller, "set")
reshaped = partial(methodcaller, "reshape")


def changed(change, *keys):
    return lambda data: data.update({key: change(data.get(key)) for key in keys})


def at(row, value, *keys):
    """Return a change of one transition."""

    def change(data):
        for key in keys:
            data[key][row] = value
        return data

    return change


def each(*changes):
    return lambda data: reduce(lambda data, change: change(data), changes, data)


def moved(rows):
    """Return a change of some transitions to those of another place, as after a reset that no flag marks."""
    return lambda data: [data[key][rows].add_(50) for key in GOALS] and data


def where_103(function):
    """Return a ``goal_fn`` that fails if one of the states contains 103."""
    return lambda states: function(states) if (states == 103).any() else states


wider = partial(torch.nn.functional.pad, pad=(0, 1))
in_parts = changed(lambda goals: TensorDict(x=goals[..., 0], batch_size=len(goals)), *GOALS)
losing_the_end = each(at(7, True, DONE), at(7, 0.0, ACHIEVED, DESIRED, ("next", "observation")))
with_whole_outcomes = changed(torch.Tensor.long, ROOT_ACHIEVED, ACHIEVED)
with_fractions = each(changed(torch.Tensor.float, ROOT_ACHIEVED, ACHIEVED), at(5, 0.5, ACHIEVED))


def with_a_large_goal(kind):
    """Return achieved goals of a dtype, one of which is 2 ** 24 + 1."""
    convert = partial(torch.Tensor.to, dtype=getattr(torch, kind))
    return each(changed(convert, ROOT_ACHIEVED, ACHIEVED), at(5, 2**24 + 1, ACHIEVED))


class Refusal(NamedTuple):
    """A write that is refused. In the words, {row} is the damaged transition, and {n} the batch size in a shape."""

    damage: Callable[[TensorDict], Any]  # of a good write
    words: str
    row: int = 0  # the damaged transition, which is added alone
    tried: tuple[int, ...] = (0, 1, 2)  # before which of three good writes it is tried; () if no write is accepted
    options: Any = types.MappingProxyType({})  # arguments of the transform
    goals: Goals = FLOATS


LEFT_OUT = r"compact_obs=True leaves it out \(use False\), and so does NextObservationDelta"
NAN = "{row} is NaN. Nothing was stored"
EARLIER = "but goal_spec or an earlier write has"
BREAKS = "Row {} of this write has transitions that do not continue each other, and no done flag.*not flattened.*ndim=2"
OTHER_ROWS = r"This write has {} row\(s\), {}, but the last write had 4, \[4\].*the same environments in every write"
FIRST, LATER = {"tried": (0,)}, {"tried": (1, 2)}
MASKED = HERKeys(mask="kept")
COMPACT = {"options": {"before": [CompactGoals]}}
BY_OBSERVATION = {"options": {"before": [lambda: MovementPriority(1.0, keys=HERKeys(achieved_goal="observation"))]}}
DAMAGED = {
    ALL: {
        "no desired goal": (without(ROOT_DESIRED),
            r"KeyError: no entry 'desired_goal'. Set keys=HERKeys\(desired_goal=.*Present"),
        "no next desired goal": (without(DESIRED), rf"KeyError: \('next', 'desired_goal'\).*{LEFT_OUT}"),
        "no done flag": (without(DONE), r"KeyError: \('next', 'done'\).*HERKeys\(done="),
        "no termination": (without(TERMINATED), r"KeyError: \('next', 'terminated'\).*HERKeys\(done=", FIRST),
        "no mask": (without("kept"), r"KeyError: no entry 'kept'.*HERKeys\(mask=", {"options": {"keys": MASKED}}),
        "goals in parts": (in_parts, r"TypeError: achieved_goal'\)? must be a tensor, got a TensorDict.*CatTensors"),
        "achieved goals of two shapes": (changed(wider, ACHIEVED),
            r"achieved goal has the shape \({n}2,?\) at the root and \({n}3,?\) under 'next'"),
        "achieved goals of two dtypes": (changed(torch.Tensor.double, ACHIEVED),
            r"achieved goal is torch\.float32 at the root and torch\.float64 under 'next'"),
        "achieved goals unlike desired goals": (changed(wider, ROOT_ACHIEVED, ACHIEVED),
            r"achieved goal has the shape \(3,\) and a desired goal \(2,\).*Pass goal_fn"),
        "goals without numbers": (changed(lambda goals: goals[..., :0], *GOALS),
            r"Goals have the shape \(0,\) and contain no number: check the goal keys"),
        "a goal that cannot be converted": (with_fractions,
            r"Achieved goals are torch\.float32 and desired goals torch\.int64: .*of {row}.*with goal_fn",
            {"row": 5, "goals": Goals(dtype=torch.int64)}),
        **{f"a goal that {dtype} cannot represent": (with_a_large_goal(kind),
            rf"Achieved goals are torch\.{kind} and desired goals torch\.{dtype}: .*of {{row}}.*with goal_fn",
            {"row": 5, "goals": Goals(dtype=getattr(torch, dtype))})
           for kind, dtype in (("int64", "uint8"), ("float32", "float16"), ("int64", "float32"))},
        **{f"two values under {key}": (change,
            rf"{key}'\) has the shape \({{n}}2,?\) for \d+ transitions.*HERKeys\({name}=")
           for key, change, name in (
               ("done", changed(lambda flag: flag.expand(-1, 2), DONE), "done"),
               ("traj_ids", entry(IDS, torch.zeros(10, 2)), "trajectory"),
               ("mask", entry(MASK, torch.ones(10, 2)), "mask"))},
        **{f"{key[1]} without the last dimension": (changed(lambda value: value.squeeze(-1), key),
            rf"{key[1]}'\) has the shape \(.*flags and rewards.*\({{n}}1,?\).* Store .*unsqueeze\(-1\)", *tried)
           for key, *tried in ((DONE,), (TERMINATED, FIRST), (("next", "truncated"), FIRST), (REWARD, FIRST))},
        "rewards of several agents": (changed(lambda reward: reward[:, None].expand(-1, 3, 1), REWARD),
            r"stored rewards have the shape \(\d+, 3, 1\).*one reward per agent", FIRST),
        "a NaN among whole goals": (each(with_whole_outcomes, at(3, math.nan, ROOT_DESIRED)), f"desired goal of {NAN}",
            {"row": 3}),
        **{f"{name} from goal_fn": (at(4, 103.0, ACHIEVED), words, {"row": 4, "options": {"goal_fn": where_103(fails)}})
           for name, fails, words in (
               ("NaN", lambda states: torch.where(states == 103, math.nan, states), f"{NAN}.*or goal_fn"),
               ("nothing", lambda states: None, "TypeError: goal_fn must return a tensor.*returned NoneType"),
               ("no row", lambda states: states[:0], r"one goal per row, .*shape \(0, 2\) for \d+ rows"))},
        "a last observation that was lost": (losing_the_end,
            r"all zeros.*\({row}\): the environment dropped it.*SerialEnv or ParallelEnv", {"row": 7}),
        "n-step transitions": (entry("steps_to_next_obs", torch.full((10, 1), 3)),
            r"n-step transitions.*Remove MultiStep.*Compose\(MultiStepTransform\("),
        "relabelled transitions": (entry(("hindsight", "relabelled"), (torch.arange(10) == 6)[:, None]),
            r"already relabelled \({row}\).*Write rb\.storage\[:\]", {"row": 6}),
        "an entry that an extra goal would replace": (entry("actor_goal", torch.zeros(10, 2)),
            "An extra goal would replace the stored entry 'actor_goal'.*Choose another key",
            FIRST | {"options": {"strategy": {"desired_goal": "future", "actor_goal": "final"}}}),
    },
    WRITES: {
        "no reward": (without(REWARD), r"KeyError: \('next', 'reward'\).*HERKeys\(reward=", FIRST),
        "goals of another shape than before": (changed(wider, *GOALS),
            rf"Goals have the shape \(3,\), {EARLIER} \(2,\)\. Pass the goal_spec", LATER),
        "goals of another dtype than before": (changed(torch.Tensor.double, *GOALS),
            r"Goals are torch\.float64, but torch\.float32 in goal_spec or an earlier write: convert", LATER),
        "a goal that changes, left out": (at(7, -1.0, DESIRED),
            r"leaves \('next', 'desired_goal'\) out, but it differs from.*Remove CompactGoals", {"row": 7} | COMPACT),
        **{f"{flag} at the root, left out": (at(4, True, flag),
            f"CompactGoals leaves '{flag}' out, but it is True.*Reset .*or remove", {"row": 4} | COMPACT)
           for flag in ("done", "terminated", "truncated")},
    },
    (Extend, Add): {
        "no place to measure": (without("observation"), "KeyError: no entry 'observation'.*achieved_goal=",
            BY_OBSERVATION),
    },
    (Augment,): {
        "several dimensions": (reshaped(1, 10),
            r"one dimension, got the batch size \[1, 10\].*rb\.extend\(data\.reshape\(-1\)\).*HERTransform"),
        "another observation": (changed(wider, "observation"),
            r"differ from earlier transitions: 'observation' is torch.float32 \[2\] and was .* \[1\]", LATER),
        "a new entry": (entry("more", torch.zeros(10)), r"'more' is new.*exclude\(\) new entries", LATER),
        "an entry less": (without("observation"), "'observation' is missing.*add missing ones", LATER),
        "text": (entry("text", NonTensorStack(*"abcdefghij")), "TypeError: 'text' is a NonTensorStack: exclude.*HERT"),
    },
    (Rows,): {  # a window would mix episodes
        "flattened, time first": (lambda data: data.transpose(0, 1).reshape(-1), BREAKS.format(0), FIRST),
        "a reset inside all rows": (moved((slice(None), slice(2, None))), BREAKS.format(0)),
        "a reset inside one row": (moved((3, slice(2, None))), BREAKS.format(3)),
        "a reset between writes": (moved(slice(None)), BREAKS.format(0), LATER),
        "other trajectories": (changed(lambda ids: ids + 9, IDS), BREAKS.format(0), LATER),
        "fewer rows": (lambda data: data[:3], OTHER_ROWS.format(3, r"\[3\]"), LATER),
        "flattened": (reshaped(-1), OTHER_ROWS.format(1, r"\[\]"), LATER),
    },
    (Adopt,): {
        "a dictionary": (methodcaller("to_dict"), "TypeError: must be a TensorDict, got a dict"),
        "no transitions": (lambda data: data[:0], r"batch size \[0\] and contains no transitions"),
        "no batch": (lambda data: data[0], r"batch size \[\] .*with batch size \[transitions\]"),
        "padding alone": (entry(MASK, torch.zeros(10)), "All rows .* are padding.*check the mask"),
        "zeros": (methodcaller("zero_"), r"are zeros, .*load_minari\("),
        "the time first": (lambda data: data.reshape(2, 5).transpose(0, 1).contiguous(),
            r"\[5, 2\], .*along dimension 0, but time must be the last .*: pass data\.transpose\(0, 1\)"),
        "a last dimension of one": (methodcaller("unsqueeze", -1), r"\[10, 1\].*time must be the last"),
        "rewards under another key": (methodcaller("rename_key_", REWARD, ("next", "agent", "reward")),
            r"KeyError: no entry \('next', 'reward'\), but it has \('next', 'agent',.*HERKeys\(reward=.*or exclude\("),
        "more transitions than goals": (lambda data: torch.cat([data, data]),
            "has 20 transitions, .*holds only 12 goals: pass capacity=20 ", {"options": {"capacity": 12}}),
        "no goals": (without(ROOT_DESIRED, DESIRED),
            r"no desired goals under 'desired_goal', and with her_ratio=0\.8.*desired_goal=.*pass her_ratio=1"),
        "no goals, and rewards without the last dimension": (
            each(without(ROOT_DESIRED, DESIRED), changed(lambda reward: reward.squeeze(-1), REWARD)),
            r"shape \(10,\), but flags and rewards need a last dimension", {"options": {"her_ratio": 1.0}}),
        "no past goals": (without(ROOT_DESIRED, DESIRED), "no desired goals, but the strategy PastDesired draws from",
            {"options": {"strategy": PastDesired(), "her_ratio": 1.0}}),
        "no rewards for ReachedReward": (without(REWARD), r"cannot compute rewards for orig.*her_ratio=1 \(got 0\.8\)",
            {"options": {"reward": ReachedReward()}}),
    },
}  # fmt: skip

# Settings and transforms with which no write is accepted

n_steps = partial(MultiStepTransform, 3, 0.9)
scaled = partial(envs.RewardScaling, 0.0, 2.0)
movement = partial(MovementPriority, 1.0)
sums = partial(envs.Reward2GoTransform, out_keys=["reward_to_go"])
cast = partial(envs.DTypeCastTransform, torch.float32, torch.float64, in_keys_inv=["observation"])


def before(*makes):
    return {"before": makes}


def normalized(key, result):
    return lambda: envs.ObservationNorm(0.0, 2.0, in_keys=[], out_keys=[], in_keys_inv=[key], out_keys_inv=[result])


def module(function, *in_keys, out=REWARD):
    return TensorDictModule(function, list(in_keys), [out])


def rewarding(function):
    return {"reward": GoalReward(function)}


def ending(function):
    return {"reward": GoalReward(reward_of, terminated_fn=lambda *goals: function(*goals) < 1)}


def all_pairs(achieved, desired):
    return torch.cdist(achieved.float(), desired.float())


def of_one(achieved, desired):
    return (achieved - desired).norm()


COMES_BEFORE = "comes before HERTransform and {}.*Place it after HERTransform"
ONE_VALUE = r"\('next', '{}'\) returned the shape {} for goals of .*must return one value per row"
ONE_KEY = r"MultiStepTransform sums \[.*Pass both transforms the same done key and the same, single reward key"
UNACCEPTED = {
    ALL: {
        "no value as reward": (rewarding(lambda *_: None), "TypeError: one value per row, but it returned None"),
        **{f"{key}, {name}": (make(function), ONE_VALUE.format(key, shape))
           for key, make in (("reward", rewarding), ("terminated", ending))
           for name, function, shape in (
               ("all pairs", all_pairs, r"\((\d+), \1\)"), ("one for all", of_one, r"\(\)"),
               ("one for all, in a list", lambda *goals: of_one(*goals)[None], r"\(1,\)"))},
        "one for each number, in a module": ({"reward": module(torch.sub, ACHIEVED, ROOT_DESIRED)},
            r"wrote the shape .* under \('next', 'reward'\), but stored rewards have the shape \(\d+, 1\)"),
        "a reward that changes its goals": (rewarding(lambda achieved, desired: reward_of(achieved.add_(1), desired)),
            r"modified its input \('next', 'achieved_goal'\).*work on a copy"),
        "a reward for discrete goals": ({"reward": EnvReward(BitFlipping(3, discrete_observation=True))},
            r"takes goals of the shape \(\), but stored goals .* \(2,\).*categorical_action_encoding=True"),
    },
    (Extend, Add, Adopt): {
        "a goal_spec of several environments": ({"goal_spec": Unbounded((4, 2))},
            rf"{EARLIER} \(4, 2\)\. Pass the goal_spec .*without the batch of environments"),
    },
    (Extend,): {
        "a scaled reward": (before(StepCounter, lambda: Compose(scaled(in_keys=[REWARD]))),
            f"RewardScaling {COMES_BEFORE.format('reads .*reward')}"),
        "a normalized goal": (before(normalized("desired_goal", "raw")),
            f"ObservationNorm {COMES_BEFORE.format('writes .*desired_goal')}"),
        "a goal that is computed": (before(normalized("scaled", "desired_goal")),
            f"ObservationNorm {COMES_BEFORE.format('reads .*desired_goal')}"),
        "a flag that is renamed before it is restored": (
            before(lambda: envs.RenameTransform(["done"], ["ended"]), CompactGoals),
            f"RenameTransform {COMES_BEFORE.format('reads .*done.* before relabelling replaces or restores')}"),
        "a flag that is set before it is restored": (
            before(lambda: envs.RenameTransform(["observation"], ["done"]), CompactGoals),
            f"RenameTransform {COMES_BEFORE.format('writes .*done.*, which relabelling then replaces')}"),
        "a cast under another name": (
            before(partial(envs.DTypeCastTransform, torch.float32, torch.float64, ["desired_goal"], ["precise_goal"])),
            f"DTypeCastTransform {COMES_BEFORE.format('reads .*desired_goal')}"),
        "an achieved goal that is overwritten": (
            before(lambda: envs.RenameTransform(["observation"], [("next", "achieved_goal")])),
            f"RenameTransform {COMES_BEFORE.format('writes .*achieved_goal')}"),
        **{f"n steps after it, a write of {count}": ({"after": [n_steps]},
            r"comes after HERTransform.*Place it before HERTransform: Compose\(MultiStepTransform",
            lambda data, count=count: data[:count])
           for count in (1, 10)},
        "n steps of n steps": (before(n_steps, n_steps), "Several MultiStepTransforms .*keep one"),
        "n steps of padding": ({"before": [n_steps], "keys": MASKED}, "padding that 'kept' marks.*split"),
        **{f"n steps, {name}={value}": (before(partial(n_steps, **{name: value})), ONE_KEY,
            entry(("next", "income"), torch.zeros(10, 1)))
           for name, value in (("reward_keys", ["income"]), ("reward_keys", ["reward", "income"]),
                               ("done_key", "truncated"))},
        "n steps, a reward of the observation": (
            {"before": [n_steps], "reward": module(torch.sub, "observation", ACHIEVED)},
            r"function of the goals, but TensorDictModule also reads \['observation'\].*GoalReward\(reward_fn\)"),
        "n steps, a module and goal_fn": (
            {"before": [n_steps], "reward": module(torch.sub, ACHIEVED, ROOT_DESIRED), "goal_fn": torch.clone},
            r"TensorDictModule reads the unmapped entry \('next', 'achieved_goal'\).*GoalReward\("),
    },
    (Add,): {"n steps of single transitions": (before(n_steps), "use extend instead of add")},
    (Augment,): {
        "movement before it": (before(movement), "KeyError: It does not work with HindsightAugmentation"),
        "a cast of relabelled transitions": (before(cast),
            r"DTypeCastTransform comes before HindsightAugmentation .*'observation'.*Place it after"),
        **{f"n steps {place} it": ({place: [n_steps]}, "For n-step returns under a new goal, use HERTransform")
           for place in ("before", "after")},
    },
    BOTH: {
        **{f"{name} {place} it": ({place: [make]}, words)
           for place in ("before", "after")
           for name, make, words in (
               ("HERTransform", make_transform, "Two transforms .*would relabel.*keep one HERTransform"),
               ("summed rewards", sums, "Reward2GoTransform sums the rewards.*Remove Reward2GoTransform"))},
        "CompactGoals after it": ({"after": [CompactGoals]}, r"CompactGoals comes after .*first: Compose\(Compact"),
        "CompactGoals twice": (before(CompactGoals, CompactGoals), "Several CompactGoals.*keep one"),
        "MovementPriority after it": ({"after": [movement]},
            r"KeyError: stamps of a HERTransform that comes after it: Compose\(MovementPriority\(.*HERTransform\("),
    },
}  # fmt: skip
REFUSED_WRITES = {
    name: (where, Refusal(damage, words, **dict(*more)))
    for where, cases in DAMAGED.items()
    for name, (damage, words, *more) in cases.items()
} | {
    name: (where, Refusal(*damage or [lambda data: data], words, tried=(), options=options))
    for where, cases in UNACCEPTED.items()
    for name, (options, words, *damage) in cases.items()
}


def check_refused_writes(how, *refusals):
    """Check that writes are refused, twice before each of three good writes, and that these agree with a twin's."""
    tried, options = refusals[0].tried, refusals[0].options
    buffer, twin = how(**options), how(**options)
    for number, data in enumerate(buffer.good_writes(refusals[0].goals) if tried else written(EPISODE)):
        state = buffer.state()
        for refusal in refusals * 2 if number in tried or not tried else ():
            error, words = split(refusal.words.replace("{n}", how.n))
            with pytest.raises(error, match=words.replace("{row}", how.row.format(refusal.row))):
                buffer.write(refusal.damage(data.clone()), refusal.row)
        assert same(buffer.state(), state), "a refused write left a trace"
        for each_buffer in (buffer, twin) if tried else ():
            torch.manual_seed(number)
            each_buffer.write_well(data.clone())
    if tried:
        assert same(buffer.result(), twin.result())
        assert buffer.result()[1]["hindsight", "relabelled"].any()


@pytest.mark.parametrize("name", REFUSED_WRITES)
def test_a_write_is_refused_wherever_it_is_made_and_leaves_no_trace(name):
    where, refusal = REFUSED_WRITES[name]
    for how in where:
        check_refused_writes(how, refusal)


@pytest.mark.parametrize("how", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_a_nan_in_any_goal_of_any_transition_is_refused_in_any_write(how, dtype):
    nan, goals, kinds = torch.tensor([0, math.nan]), Goals(dtype=dtype), ("achieved", "achieved", "desired", "desired")
    places = [(row, key, kind) for row in range(10) for key, kind in zip(GOALS, kinds, strict=True)]
    refusals = [Refusal(at(row, nan, key), f"{kind} goal of {NAN}", row, goals=goals) for row, key, kind in places]
    check_refused_writes(how, *refusals)


@pytest.mark.parametrize(("shape", "row"), [((-1,), "33333"), ((2, -1), r"\[1, 13333\]"), ("alternating", "33333")])
def test_the_row_of_a_data_set_is_named_however_large_it_is(shape, row):
    """A data set is read in pieces, and in the order of its trajectories."""
    data = torch.cat(written(EPISODE) * 4000)
    data[ACHIEVED][33_333] = math.nan
    data = data.set(IDS, torch.arange(40_000) % 3) if shape == "alternating" else data.reshape(shape)
    buffer = Adopt(capacity=40_000)
    state = buffer.state()
    with pytest.raises(ValueError, match=f"achieved goal of row {row} of the data is NaN"):
        buffer.write_well(data)
    assert same(buffer.state(), state)


# Writes that only look damaged

ACCEPTED = {
    "padding that is NaN": each(at(9, False, MASK), at(9, math.nan, ACHIEVED)),
    "padding that is zero": each(at(9, False, MASK), at(9, 0.0, *GOALS), at(9, True, DONE)),
    "whole achieved goals": with_whole_outcomes,
    "a list": list,
    "a desired goal at the origin": at(9, 0.0, *GOALS, ("next", "observation")),
    "a last observation of other entries": at(9, 0.0, ACHIEVED, DESIRED),
    "goals alone": each(at(9, 0.0, ACHIEVED, DESIRED), without("observation", ("next", "observation"))),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_write_that_only_looks_damaged_is_accepted(name):
    buffer = Extend(her_ratio=1.0, kind=ReplayBuffer)
    buffer.rb.extend(ACCEPTED[name](written(EPISODE)[0].set(MASK, torch.ones(10, dtype=torch.bool))))
    buffer.hindsight.flush()
    assert buffer.rb[:]["hindsight", "relabelled"][:, 0].tolist() == [True] * 9 + ["padding" not in name]


@pytest.mark.parametrize("settings", [{}, before(n_steps), before(CompactGoals)])
def test_an_empty_write_changes_nothing(settings):
    buffer = Extend(**settings)
    for data in written(["go"] * 10, ["truncated"] * 10):
        buffer.rb.extend(data)
        state = buffer.state()
        buffer.rb.extend(data[:0])
        assert same(buffer.state(), state)


# Calls


def filled(how=Extend, **options):
    """Return a buffer with three episodes."""
    buffer = how(**options)
    for data in written(*[EPISODE] * 3):
        buffer.rb.extend(data)
    return buffer.rb


def adopted(*makes, damage=lambda data: data, **options):
    """Return a buffer over an adopted data set of three episodes, with other transforms before HERTransform."""
    buffer = Adopt(makes, **{"capacity": 30} | options)
    buffer.write_well(damage(torch.cat(written(*[EPISODE] * 3))))
    return buffer.rb


def without_goals(change=lambda data: data, *, her_ratio=1.0):
    """Return a buffer over a data set without goals, whose transitions were changed after the adoption."""
    rb = adopted(damage=without(ROOT_DESIRED, DESIRED, REWARD), her_ratio=1.0)
    rb.transform[0].her_ratio = her_ratio
    return TensorDictReplayBuffer(storage=TensorStorage(change(rb.storage[:].clone())), transform=rb.transform)


def over_storage_of(rb):
    """Return a buffer with a HERTransform alone over the transitions of another buffer."""
    return TensorDictReplayBuffer(storage=TensorStorage(rb.storage[:]), transform=make_transform())


def with_scaled_rewards():
    """Return a buffer whose first transform was replaced."""
    rb = filled(before=[StepCounter])
    rb.transform.pop(0)
    rb.transform.insert(0, scaled(in_keys=[REWARD]))
    return rb


def shared():
    rb = filled(capacity=100)
    rb.transform[0].share_memory_()
    return rb


def loaded():
    rb = Extend().rb
    rb.load_state_dict(filled().state_dict())
    return rb


def dropping(key):
    """Return a buffer whose samples lack an entry."""
    kept = [each for each in (*GOALS, REWARD, DONE, TERMINATED, STAMP) if each != key]
    return filled(before=[lambda: envs.SelectTransform(*kept, keep_rewards=False, keep_dones=False)])


def extend(rb):
    rb.extend(written(EPISODE)[0])


def adopt(rb):
    rb.transform[-1].adopt(written(EPISODE)[0])


def loading(make, *arguments, **options):
    """Return a call that loads the state of another buffer."""
    return lambda rb: rb.transform[0].load_state_dict(make(*arguments, **options).transform[0].state_dict())


class Chooses(GoalStrategy):
    """A strategy given by a function."""

    def __init__(self, function):
        self.function = function

    def select(self, transitions):
        return self.function(transitions)


@tensorclass
class Transitions:
    achieved_goal: torch.Tensor
    next: TensorDict


compact, augmented = partial(filled, before=[CompactGoals]), partial(filled, Augment)
sample = methodcaller("sample", 10)
HAS_ADOPTED = r"RuntimeError: has adopted a data set, and .*ReplayBufferEnsemble\("
NO_STAMP = r"KeyError: no stamp .*written before HERTransform .*transform=HERTransform\(.*result of adopt\(\)"
DROPPED = r"KeyError: no entry {}, although it was written\. Place the transform that drops it after HERTransform"
NOT_WRITTEN = (
    r"{} changes transitions when they are written, but adopted data .*Remove it, or write the data set with rb\.extend"
)
SELECTED = r"the episode and the step of one goal .*, two tensors torch\.int64 \(10,\), but select\(\) returned "
REFUSED_CALLS = {  # a function that makes a buffer, a call, and the words
    **{f"{name}, adopted": (adopted, call, HAS_ADOPTED)
       for name, call in (("extend", extend), ("extend with nothing", lambda rb: rb.extend(rb.storage[:0])),
                          ("add", lambda rb: rb.add(rb.storage[3])), ("clear", lambda rb: rb.transform[0].clear()),
                          ("set an item", lambda rb: rb.__setitem__(3, rb.storage[4])))},
    "adopt twice": (adopted, adopt, "already adopted a data set: create another one for each"),
    "adopt after a write": (filled, adopt, "needs an empty goal table.*create another one .*ReplayBufferEnsemble"),
    "adopt after loading": (loaded, adopt, "needs an empty.*written or loaded"),
    "adopt with a shared table": (shared, adopt, r"Processes already share .*: call adopt\(\) before you create"),
    "sample n steps, adopted": (lambda: adopted(n_steps), sample, NOT_WRITTEN.format("MultiStepTransform")),
    "sample by movement, adopted": (lambda: adopted(movement), sample, NOT_WRITTEN.format("MovementPriority")),
    "sample missing goals": (lambda: without_goals(her_ratio=0.5), sample, "no desired goals .*pass her_ratio=1"),
    "sample other data without goals": (
        lambda: without_goals(changed(lambda stamp: stamp - (10**6 << 25), STAMP)), sample,
        "no desired goals, and contains transitions .*not adopted: create the storage from the result of adopt"),
    "sample what was written before": (lambda: over_storage_of(TensorDictReplayBuffer(
        storage=TensorStorage(written(EPISODE)[0]))), sample, NO_STAMP),
    **{f"sample without {key}": (partial(dropping, key), sample, DROPPED.format(re.escape(repr(key))))
       for key in (ROOT_DESIRED, DESIRED, REWARD)},
    "sample compact transitions": (lambda: over_storage_of(filled(before=[CompactGoals])), sample,
        r"KeyError: CompactGoals, sample with it too: Compose\(CompactGoals\(\), HERTransform"),
    "sample n steps alone": (lambda: over_storage_of(filled(before=[n_steps], kind=ReplayBuffer)), sample,
        "span several steps .*no MultiStepTransform comes before.*Create the buffer with the transforms"),
    "sample part of a sequence": (lambda: filled(sequence_length=4), sample,
        "has 10 transitions, .* multiple of sequence_length=4. Set sequence_length to the slice length of the sampler"),
    **{f"select {got}": (partial(filled, strategy=Chooses(function)), sample, SELECTED + got)
       for function, got in ((lambda choice: choice.step[:5], r"torch\.int64 \(5,\)"), (lambda choice: 3, "int"),
                             (lambda choice: choice.step.float(), r"torch\.float32 \(10,\)"))},
    **{f"{name} after a change of transforms": (with_scaled_rewards, call, "RewardScaling comes before HERTransform")
       for name, call in (("sample", sample), ("extend", extend), ("compile", lambda rb: rb.transform[1].compile()))},
    "sample on another device": (shared, lambda rb: rb.transform(rb.storage[:].to("meta")),
        "RuntimeError: on meta, but the goal table is shared between processes on cpu.*Pass .* goal_spec on the dev"),
    "add to an augmentation": (lambda: filled(Augment), lambda rb: rb.add(rb.storage[0]),
        r"got a single transition \(rb\.add or rb\[i\] = \.\.\.\)\. Use rb\.extend.*HERTransform works with add"),
    "extend with a tensorclass": (lambda: filled(kind=ReplayBuffer),
        lambda rb: rb.extend(Transitions.from_tensordict(written(EPISODE)[0].select("achieved_goal", "next"))),
        r"TypeError: must be a TensorDict, got a Transitions\. Convert a tensorclass with to_tensordict\(\)"),
    "share without goal_spec": (lambda: Extend().rb, lambda rb: rb.transform[0].share_memory_(),
        r'RuntimeError: table before the first write: pass goal_spec=env\.observation_spec\["achieved_goal"\]'),
    # States of other buffers
    "load another capacity": (lambda: Extend(capacity=50).rb, loading(filled, capacity=40),
        "saved goal table holds 40 goals, but this one holds 50.*capacity=40, then load"),
    "load goals of another shape": (lambda: Extend(goal_spec=Unbounded(3)).rb, loading(filled),
        r"saved goals are torch\.float32 \(2,\), but goals of this transform are torch\.float32 \(3,\)"),
    "load other goals of episodes": (filled, loading(filled, strategy="past_desired"),
        "keeps desired goals, and this one no further goals.*strategies that need the same goals"),
    "load another capacity of an augmentation": (lambda: augmented(max_episode_steps=30, capacity=40),
        loading(augmented, max_episode_steps=30, capacity=50), "saved goal table holds 50.*capacity=50, then load"),
    "load an augmentation": (filled, loading(augmented), "by HindsightAugmentation, not HERTransform: create"),
    "load a HERTransform": (augmented, loading(filled), "by HERTransform, not HindsightAugmentation: create"),
    "load compact transitions": (filled, loading(compact), r"saved with CompactGoals.*Compose\(CompactGoals\(\), HER"),
    "load complete transitions": (compact, loading(filled), "saved without CompactGoals.*Create the buffer without"),
    "load over a data set": (adopted, loading(filled, capacity=30), "adopted a data set, but the saved one had not"),
    "load data without goals": (lambda: Extend(capacity=30).rb, loading(without_goals), "pass her_ratio=1"),
    # Other methods
    "call a transform that is missing": (filled, lambda rb: call_transform(
        ReplayBuffer(storage=LazyTensorStorage(9), transform=StepCounter()), "report"),
        "must have one HERTransform or HindsightAugmentation, but it has 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_a_call_is_refused_again_and_again_and_changes_nothing(name):
    make, call, words = REFUSED_CALLS[name]
    rb = make()
    for _ in range(2):
        check_refused(rb, lambda: call(rb), *split(words))


def test_a_goal_table_that_does_not_fit_into_shared_memory_is_refused(monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=2**30 // 10))
    words = r"for capacity=9,000,000 goals, torch\.float32 \[2\], takes 0\.\d\d GiB .* 0\.10 GiB are free\. Pass a"
    with pytest.raises(RuntimeError, match=words):
        make_transform(capacity=9_000_000, goal_spec=Unbounded(2)).share_memory_()


# Transforms of environments


@pytest.mark.parametrize("make", [make_transform, make_augmentation, CompactGoals, movement])
def test_a_transform_that_an_environment_refuses_can_be_given_to_a_buffer(make):
    transform = make()
    words = r"{0} is a transform of replay buffers and cannot be .* of an environment: .*transform={0}\(\.\.\.\)\)"
    for use in (
        lambda env: TransformedEnv(env, transform),
        lambda env: TransformedEnv(env, Compose(StepCounter(), Compose(transform))),
        lambda env: TransformedEnv(env, Compose(StepCounter())).insert_transform(0, transform),
    ):
        with pytest.raises(ValueError, match=words.format(type(transform).__name__)):
            use(GymEnv(POINT_REACH))
    hindsight = [] if make in (make_transform, make_augmentation) else [make_transform()]
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=Compose(transform, *hindsight))
    rb.extend(written(EPISODE)[0])
    assert rb.sample(50)["hindsight", "relabelled"].any()


# Arguments of constructors and functions


def extra(*keys):
    return dict.fromkeys(["desired_goal", *keys], "future")


class VectorizedInProcess(GymEnv):
    """GymEnv(..., num_envs=2) without processes. Like the original, it loses the last steps of episodes."""

    def _async_env(self, makers):
        return gymnasium.vector.SyncVectorEnv(makers)


class Efforts(PointReach):
    """An environment whose reward reads info."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        return super().compute_reward(achieved_goal, desired_goal, info) - info["effort"]


class NeverReset(PointReach):
    """An environment whose reward reads an attribute that only reset sets."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        return super().compute_reward(achieved_goal, self.target, info)

    def reset(self, **options):
        self.target = np.zeros(2)
        return super().reset(**options)


class Misspelled(PointReach):
    """An environment whose reward reads an attribute that an array does not have."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        return achieved_goal.target


def rewarded_by(env):
    """Return rewards that an environment computes."""
    return EnvReward(env)(goals_of(torch.zeros(2, 2), torch.zeros(2, 2)))


def rewarded(info_keys):
    """Return rewards of transitions with an entry "fee", and an "effort" that is no tensor."""
    data = goals_of(torch.zeros(2, 2), torch.zeros(2, 2)).set("fee", torch.zeros(2)).set_non_tensor("effort", 0.5)
    return EnvReward(Efforts(), info_keys=info_keys)(data)


def with_attribute(module, **attributes):
    """Return a module with other attributes."""
    vars(module).update(attributes)
    return module


def load_arrays(**changes):
    """Load an OGBench file with other arrays."""
    arrays = {"observations": np.zeros((5, 2)), "actions": np.zeros((5, 2)), "terminals": np.array([0, 0, 1, 0, 1])}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "maze.npz"
        np.savez(path, **{name: array for name, array in (arrays | changes).items() if array is not None})
        load_ogbench(path)


HER, AUGMENTATION, ENDS = make_transform, make_augmentation, partial(GoalReward, reward_of)
MAKE_ONE = partial(GymEnv, f"torchrl_her.envs:{POINT_REACH}")
SERIAL = envs.SerialEnv(2, MAKE_ONE)
NOT_WHOLE = [-1, -3, 2.5, 1e6, math.nan, "10", True]
AT_LEAST = "{} must be an integer of at least {}, got {{}}"
SEVERAL = "TypeError: EnvReward needs a single environment, got a {}: pass a function that creates one"
TWO_ARGUMENTS = r"TypeError: {} is called with two arguments, .* but its signature is \(.*pass a TensorDictModule"
OF_UNIFORM = partial(GoalSelection, selector=Uniform())
SELECTION = partial(OF_UNIFORM, HER())
LOW = {"desired_goal": "future", "low": Subgoal(2, limit="high")}
OVERLAPPING = [extra("goal", ("goal",)), extra("goal", ("goal", "of_actor")), extra(("goal", "of_actor"), "goal")]
USED = ["achieved_goal", ("desired_goal",), "reward", "done", "terminated", "collector", "index", IDS]
USED_TOO = [("achieved_goal", "part"), ("next", "goal"), ("hindsight", "goal")]
REFUSED_ARGUMENTS = [  # a function, its argument or None if it has one, wrong values, and the words; {} is the value
    (HER, "her_ratio", [-0.1, 1.0001, 4, math.nan, "0.8", None], r"in \[0, 1\], got {}\..*k / \(k \+ 1\)"),
    *((HER, name, [0, *NOT_WHOLE], AT_LEAST.format(name, 1))
      for name in ("capacity", "max_episode_steps", "sequence_length")),
    (HER, "goal_fn", [5, "achieved"], "TypeError: goal_fn must be a function that maps .*got {}"),
    (HER, "goal_spec", [Composite(achieved_goal=Unbounded(2)), (2,)],
        r'TypeError: goal_spec must be the spec of one goal, got a .*env\.observation_spec\["achieved_goal"\]'),
    *((make, "keys", [{"desired_goal": "goal"}, "goal"], r"TypeError: must be HERKeys, such as HERKeys\(.*got {}")
      for make in (HER, AUGMENTATION, movement, NormalizedInputs, partial(check_goal_env, POINT_REACH))),
    (HERKeys, "achieved_goal", ["desired_goal", ("desired_goal",)],
        "different keys for achieved_goal and desired_goal, got 'desired_goal' for both"),
    (HERKeys, "done", ["next", DONE, (("next", "agent"), "done")],
        r"Pass HERKeys\(done=\.\.\.\) without 'next', which is added automatically"),
    (HERKeys, "reward", [None, 3, (), ("agent", 0), ["reward"]],
        r"TypeError: HERKeys\(reward=\.\.\.\) must be the name of an entry or a tuple of names, got {}"),
    (HER, "strategy", ["futur", "", "Futures", "future "], "Unknown strategy {}: use one of 'current', .*or a GoalS"),
    (HER, "strategy", [Future, None, 3], r"TypeError: a GoalStrategy, got {}.*strategy=Future\(\)"),
    (HER, "strategy", [Subgoal(2, limit="high")], "goal is drawn first, but {} refers to 'high'.*for an extra goal"),
    (HER, "strategy", [{Future(): 0.5, Random(): 0.5}, {"desired_goal": 1}, extra("actor_goal") | {"low": 0.3}],
        r"TypeError: must map the keys of goals to strategies, got {}.*pass strategy=Mixture\({\.\.\.}\)"),
    (HER, "strategy", [{}, {"actor_goal": "future"}, {("goal", "desired_goal"): "final"}],
        "needs the name 'desired_goal', which means the desired goal, whatever its key is, got {}"),
    (HER, "strategy", [extra("low") | {Future(): "final"}, extra("low") | {3: "final"}],
        r"TypeError: must map the keys of goals to strategies, but (Future\(\)|3) is not a key"),
    (HER, "strategy", [extra("low") | {"low": Future}, {"desired_goal": None}], "TypeError: a GoalStrategy, got"),
    (HER, "strategy", [*map(extra, USED), *map(extra, USED_TOO), *OVERLAPPING],
        "strategy has the key .* which transitions or another extra goal already use.*Choose another key"),
    (partial(HER, keys=HERKeys(desired_goal="target")), "strategy", [extra("target")],
        "strategy has the key 'target', which transitions"),
    (HER, "strategy", [LOW, LOW | {"high": "future"}, LOW | {"low": Subgoal(2, limit="low")}],
        "extra goal 'low' refers to '(high|low)', for which no goal is drawn earlier.*place that extra goal earlier"),
    (HER, "reward", [0.05, "sparse"], r"TypeError: must be a function of \(achieved_goal, .*got {}"),
    (HER, "reward", [lambda goal: goal, lambda one, other, info: one], TWO_ARGUMENTS.format("the reward function")),
    (HER, "reward", [EnvReward, SparseReward], r"TypeError: the class (\w+): pass an instance, \1\(\.\.\.\)"),
    (HER, "reward", [PointReach(), GymEnv(POINT_REACH)],
        r"TypeError: must be a module or a function, got an environment: pass HERTransform\(EnvReward\(env\)\)"),
    (HER, "reward", [module(torch.sub, ACHIEVED, ROOT_DESIRED, out="reward")],
        r"must write \('next', 'reward'\), but its out_keys are \['reward'\].*HERKeys\(reward="),
    (partial(HERTransform, capacity=10), "reward", [TensorDictSequential()],
        r"must write \('next', 'reward'\), but its out_keys are \[\]"),
    *((make, "reward", [with_attribute(ReachedReward(), recompute_all=True)],
        r"reads the number of steps to the goal.*Replace ReachedReward with GoalReward\(reward_fn, recompute_all")
      for make in (HER, AUGMENTATION)),
    (AUGMENTATION, "n_sampled_goal", NOT_WHOLE, AT_LEAST.format("n_sampled_goal", 0)),
    *((AUGMENTATION, name, [0, 2.5], AT_LEAST.format(name, 1)) for name in ("capacity", "max_episode_steps")),
    (Mixture, None, [{}, [Future()], None], r"strategies and their probabilities, such as {Future\(\): 1\.0}, got {}"),
    (Mixture, None, [{Future(): 0.5, Random(): 0.4}], r"probabilities of Mixture\(.* must sum to 1, got the sum 0\.9"),
    (Mixture, None, [{Future(): value} for value in (-0.5, 1.5, math.nan, None, "1", True)],
        r"probability of a member of a Mixture must be in \[0, 1\], got (-0\.5|1\.5|nan|None|'1'|True)\."),
    (Geometric, None, [1.0, -0.1, math.nan, "0.9", True], "discount must be at least 0 and less than 1, got {}"),
    (Subgoal, None, [0, *NOT_WHOLE], AT_LEAST.format("steps", 1)),
    (ENDS, "terminated_fn", [lambda: 0, lambda one, other, info: one], TWO_ARGUMENTS.format("terminated_fn")),
    (ENDS, "terminated_fn", [0.05], r"TypeError: terminated_fn must be a function of \(achieved_goal, .*got {}"),
    (SparseReward, None, [-0.1, math.nan, "0.1", None], "threshold is a distance and must be at least 0, got {}"),
    (EnvReward, None, [SERIAL, TransformedEnv(SERIAL, StepCounter()), lambda: envs.ParallelEnv(2, MAKE_ONE),
        lambda: VectorizedInProcess(POINT_REACH, num_envs=2), lambda: gymnasium.make_vec(POINT_REACH, 2)],
        SEVERAL.format("(SerialEnv|ParallelEnv|VectorizedInProcess|SyncVectorEnv)")),
    (EnvReward, None, ["CartPole-v1", lambda: GymEnv("CartPole-v1")],
        r"TypeError: goal environment, with compute_reward\(.*CartPoleEnv has none.*GoalReward\(reward_fn\)"),
    (rewarded_by, None, [NeverReset(), GymWrapper(NeverReset()), gymnasium.wrappers.TimeLimit(NeverReset(), 50)],
        r"RuntimeError: compute_reward of NeverReset reads self\.target, which the environment does not have: read the "
        "arguments .*, or, if reset sets the attribute, pass an environment that was reset"),
    (rewarded_by, None, [Misspelled()], "AttributeError: 'numpy.ndarray' object has no attribute 'target'"),
    (rewarded, None, ["fee"], r"TypeError: info_keys must be a list of keys, got the string {}: pass \[{}\]"),
    (rewarded, None, [["tax"]], "KeyError: no entry 'tax'.*info_keys=.*Present entries"),
    (rewarded, None, [[]], r"KeyError: compute_reward of Efforts reads info\['effort'\], but info has no entries\."),
    (rewarded, None, [["fee"]], r"KeyError: reads info\['effort'\], but info has \['fee'\].*in info_keys=\["),
    (rewarded, None, [["effort"]], "TypeError: 'effort' must be a tensor, got a .*one value per transition"),
    (MovementPriority, None, [0.0, -1.0, math.nan, math.inf], r"positive and finite, got far={} and lowest=0\.05"),
    (movement, "lowest", [0.0, -1.0, math.inf], r"far and lowest must be .* got far=1\.0 and lowest={}"),
    (NormalizedInputs, "in_keys", ["observation", ["desired_goal", 3]], "TypeError: in_keys must be a list of keys"),
    (NormalizedInputs, "in_keys", [["desired_goal", "desired_goal"]], "must differ from each other"),
    (NormalizedInputs, "in_keys", [["observation"], ["observation", "target"]],
        r"must include the desired goal, 'desired_goal', got {}\. If it has another key, pass keys=HERKeys"),
    (NormalizedInputs, "out_key", [None], "TypeError: out_key a key, got .* and None"),
    (NormalizedInputs, "out_key", ["observation"], "must differ from each other"),
    (NormalizedInputs, "clip", [0, math.nan, "5"], "clip must be positive, got {}"),
    (NormalizedInputs, "goal_fn", [3], "TypeError: goal_fn must be a function and normalize a bool, got {} and True"),
    (NormalizedInputs, "normalize", ["no"], "TypeError: normalize a bool, got None and {}"),
    *((BitFlipping, name, [0], f"{name} must be at least 1.*got {{}}") for name in ("n_bits", "max_steps")),
    (partial(BitFlipping, image_observation=True), "n_bits", [1297], "n_bits must be at most 1296.*got {}"),
    (partial(BitFlipping, discrete_observation=True), "n_bits", [63], "n_bits must be at most 62.*got {}"),
    (partial(BitFlipping, image_observation=True), "discrete_observation", [True], "set only one of"),
    (PointReach, "render_mode", ["human"], r"rgb_array.*{}"),
    (SELECTION, "share", [-0.1, 1.5], r"share is a probability and must be in \[0, 1\], got {}"),
    *((SELECTION, name, [0], f"{name} must be at least 1, got {{}}") for name in ("candidates", "start")),
    (partial(GoalSelection, HER()), "selector", [Uniform], "TypeError: selector must be a GoalSelector, such as"),
    (OF_UNIFORM, "hindsight", [ReplayBuffer()], "TypeError: be the HERTransform of the buffer, got a ReplayBuffer"),
    (OF_UNIFORM, "hindsight", [HER(ReachedReward()), HERTransform(None)],
        r"pass HERTransform a GoalReward\(reward_fn\), .* instead of None or ReachedReward"),
    (OF_UNIFORM, "hindsight", [HER(capacity=400)],
        "has start=500 goals, but it holds at most 400: pass a smaller start, or HERTransform a larger capacity"),
    (OF_UNIFORM, "hindsight", [HER(keys=HERKeys(done=("agent", "done")))],
        r"done flags at the root, got \('agent', 'done'\)"),
    (LowestDensity, "bandwidth", [0], "bandwidth must be positive, got {}"),
    (LowestDensity, "fitted", [0, 10_001], "fitted must be from 1 to 10000, got {}"),
    (partial(check_goal_env, PointReach()), "ignore", [["reward-diff"]],
        r"no finding \['reward-diff'\] to ignore.*'reward-differs'"),
    (partial(check_goal_env, PointReach()), "steps", [0, "100"], "steps must be an integer of at least 1, got {}"),
    (partial(check_goal_env, PointReach()), "reward", [lambda goal: goal], TWO_ARGUMENTS.format("the reward function")),
    (check_goal_env, None, [None, SERIAL, gymnasium.make_vec(POINT_REACH, 2)],
        "TypeError: check_goal_env needs one Gymnasium environment"),
    (load_minari, None, ["maze"], r"TypeError: needs a Minari data set, got {}: pass minari\.load_dataset\(name\)"),
    (load_minari, None, [types.SimpleNamespace(iterate_episodes=lambda: [])], "Minari data set has no transitions"),
    (load_ogbench, None, ["maze.npy"], r"reads \.npz files, got {}: pass the path"),
    (load_arrays, "terminals", [None], "KeyError: maze.npz has no array 'terminals', .*present: observations, actions"),
    (load_arrays, "terminals", [np.zeros(5)], "last state in .*maze.npz is not terminal.*incomplete"),
    (load_arrays, "terminals", [np.ones(5)], "Every state in .*maze.npz is terminal, so it has no transitions"),
    (load_arrays, "terminals", [np.ones((5, 1)), np.ones(4)], r"maze.npz .*lengths differ.*'terminals' has shape \("),
    (load_arrays, "actions", [np.zeros((4, 2)), np.zeros(())], "of .*maze.npz must have one row.*'actions': [40]"),
    (load_arrays, "room", [np.array(["hall"] * 5)], "TypeError: 'room' of .*maze.npz has the dtype <U4.*leave it out"),
    (load_arrays, "room", [np.array({})], "array 'room' of .*maze.npz cannot be read .*leave the array out"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED_ARGUMENTS)), ids=lambda number: REFUSED_ARGUMENTS[number][3][:50])
def test_an_argument_is_refused(number):
    function, argument, values, words = REFUSED_ARGUMENTS[number]
    error, words = split(words)
    for value in values:
        with pytest.raises(error, match=words.replace("{}", re.escape(repr(value)))):
            function(**{argument: value}) if argument else function(value)
