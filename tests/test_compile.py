"""The sampling half compiles in one piece and once, and waits for no value of a tensor."""

import copy
import functools
import os
import pickle
import shutil

import pytest
import tape
import torch
from tensordict import TensorDict
from test_losses import make
from test_strategies import LEVEL, RIGHT, distribution, draw, draws_needed, make_buffer, p_value
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import CatTensors, Compose, GymWrapper, MultiStepTransform, ObservationNorm, RewardScaling

from torchrl_her import EnvReward, GoalReward, GoalStrategy, HERTransform, SparseReward
from torchrl_her.envs import BitFlipping, PointReach

WEIGHTS = torch.tensor(tape.WEIGHTS, dtype=torch.float32)


def reward_of(achieved, desired):
    """The environment's reward."""
    return (achieved * WEIGHTS).sum(-1) - 2 * (desired * WEIGHTS).sum(-1)


REWARDS = {
    "SparseReward": SparseReward(0.0),
    "SparseReward, terminated_fn": SparseReward(0.0, terminated_fn=tape.reached),
    "GoalReward": GoalReward(reward_of),
    "GoalReward, terminated_fn": GoalReward(reward_of, terminated_fn=tape.reached),
}
HALVES = [
    *[("future", reward, None) for reward in REWARDS],
    *[(strategy, "SparseReward, terminated_fn", None) for strategy in RIGHT[1:]],
    *[(strategy, "GoalReward", 4) for strategy in RIGHT],
]
each_half = pytest.mark.parametrize(("strategy", "reward", "sequence_length"), HALVES)


@pytest.fixture(autouse=True)
def begin_anew():
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that counts what it is given to compile."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


@functools.cache
def collected(frames=100, discrete=False):
    return next(iter(Collector(tape.make_tape(discrete=discrete), None, frames_per_batch=frames, total_frames=frames)))


def buffer(transform, *data):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), transform=transform, batch_size=64)
    for written in data:
        rb.extend(written)
    return rb


def some(rb, count=16, length=4):
    """Rows as they are stored: sequences of so many."""
    begins = torch.randint(0, len(rb) - length + 1, (count, 1))
    return rb.storage[(begins + torch.arange(length)).flatten()]


def check(batch, strategy, reward):
    """The oracle's check, of rewards by hand where they are not the environment's."""
    if "SparseReward" in reward:
        batch = batch.clone()
        relabelled = batch["hindsight", "relabelled"]
        reached = (batch["next", "achieved_goal"] == batch["desired_goal"]).all(-1, keepdim=True)
        assert torch.equal(batch["next", "reward"][relabelled], reached.float()[relabelled] - 1.0)
        batch["next", "reward"] = reward_of(batch["next", "achieved_goal"], batch["desired_goal"]).unsqueeze(-1)
    return tape.check(batch, strategy, flags="terminated_fn" in reward)


# Compilation


@each_half
def test_it_compiles_in_one_piece_and_once_whatever_is_written_later(strategy, reward, sequence_length):
    her = HERTransform(REWARDS[reward], strategy=strategy, sequence_length=sequence_length, capacity=120)
    first, *rest = collected(400).split(20)
    rb = buffer(her, first)
    graphs, count = Graphs(), tape.Count()
    relabel = torch.compile(her, fullgraph=True, backend=graphs)
    for written in rest:  # the table wraps round three times
        count += check(relabel(some(rb)), strategy, reward)
        rb.extend(written)
    her.flush()
    count += check(relabel(some(rb)), strategy, reward)
    assert graphs.count == 1
    assert count.share > 0.2  # most goals have left the table


@pytest.mark.parametrize("env", [PointReach, BitFlipping])
def test_the_code_of_an_environment_compiles_where_it_can_be_traced(env):
    env = GymWrapper(env())
    rb = buffer(HERTransform(EnvReward(env)), env.rollout(100, break_when_any_done=False))
    rows = some(rb)
    relabel = torch.compile(rb.transform, fullgraph=True, backend="eager")
    torch.manual_seed(0)
    compiled = relabel(rows)
    torch.manual_seed(0)
    assert (compiled == rb.transform(rows)).all()
    assert compiled["hindsight", "relabelled"].any()


def test_batches_of_other_sizes_compile_it_once_more_at_most():
    rb = buffer(HERTransform(REWARDS["GoalReward"]), collected())
    graphs = Graphs()
    relabel = torch.compile(rb.transform, fullgraph=True, backend=graphs)
    for count in (16, 8, 3, 20, 16):
        check(relabel(some(rb, count)), "future", "GoalReward")
    assert graphs.count == 2


def test_it_compiles_together_with_the_transforms_around_it():
    reward = GoalReward(reward_of, terminated_fn=tape.reached)
    cat = CatTensors(in_keys=["observation", "desired_goal"], out_key="both", del_keys=False, sort=False)
    rb = buffer(Compose(HERTransform(reward), cat), collected())
    relabel = torch.compile(rb.transform, fullgraph=True, backend="eager")
    batch = relabel(some(rb))
    assert check(batch, "future", "GoalReward, terminated_fn").share > 0.5
    assert torch.equal(batch["both"], torch.cat([batch["observation"], batch["desired_goal"]], dim=-1))


@pytest.mark.parametrize("transform", [RewardScaling(0.0, 0.5), ObservationNorm(0.0, 0.5, in_keys=["reward"])])
def test_some_transforms_break_the_graph_by_themselves(transform):
    """TorchRL's own: they keep a flag in a tensor. HERTransform compiles by itself beside them."""
    rewards = TensorDict({"reward": torch.ones(4, 1)}, batch_size=4)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="standard_normal"):
        torch.compile(transform, fullgraph=True, backend="eager")(rewards)
    transform = type(transform)(0.0, 0.5, in_keys=[("next", "reward")])
    rb = buffer(Compose(HERTransform(REWARDS["GoalReward"]), transform), collected())
    rb.transform[0].compile(fullgraph=True, backend="eager")
    batch = rb.sample()
    batch["next", "reward"] *= 2.0
    assert check(batch, "future", "GoalReward").share > 0.5


@pytest.mark.parametrize("transform", [None, HERTransform(REWARDS["GoalReward"])], ids=["no transform", "hindsight"])
def test_a_buffer_takes_a_lock_that_does_not_compile(transform):
    """TorchRL's own, with its compilable=True and without."""
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(1000, compilable=True), transform=transform, batch_size=64, compilable=True
    )
    rb.extend(collected())
    with pytest.raises(torch._dynamo.exc.Unsupported, match="RLock"):
        torch.compile(rb.sample, fullgraph=True, backend="eager")()


def test_it_compiles_together_with_n_step_returns():
    reward = GoalReward(reward_of, terminated_fn=tape.reached)
    rb = buffer(Compose(MultiStepTransform(3, 0.9), HERTransform(reward, her_ratio=1.0)), collected())
    rows, graphs = some(rb), Graphs()
    relabel = torch.compile(rb.transform, fullgraph=True, backend=graphs)
    for _ in range(3):
        torch.manual_seed(0)
        compiled = relabel(rows)
        torch.manual_seed(0)
        assert (compiled == rb.transform(rows)).all()
    assert compiled["hindsight", "relabelled"].any()
    assert graphs.count == 1


@pytest.mark.filterwarnings("ignore:No target network updater")
def test_it_compiles_together_with_the_loss():
    her = HERTransform(GoalReward(reward_of, terminated_fn=tape.reached))
    rb = buffer(her, collected(discrete=True))
    loss = make("DQNLoss")

    def update(rows):
        batch = her(rows)
        return loss(batch)["loss"], batch

    compiled = torch.compile(update, fullgraph=True, backend="eager")
    for _ in range(2):
        value, batch = compiled(some(rb))
        assert check(batch, "future", "GoalReward, terminated_fn").share > 0.5
        torch.testing.assert_close(value, loss(batch)["loss"])
        value.backward()


def has_compiler():
    return shutil.which(os.environ.get("CXX", "g++")) is not None


@pytest.mark.parametrize(
    ("strategy", "backend"),
    [
        pytest.param("future", "inductor", marks=pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")),
        pytest.param("random", "inductor", marks=pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")),
        ("final", "aot_eager"),
        ("episode", "aot_eager"),
    ],
)
def test_what_is_drawn_has_the_same_distribution(strategy, backend):
    lengths = (12, 1, 2, 5)
    rb = make_buffer(strategy, lengths)
    rb.transform[0].compile(fullgraph=True, backend=backend)
    torch.manual_seed(0)
    count = draws_needed(strategy, lengths)
    draws = draw(rb, count)
    assert len(draws) == count
    assert p_value(draws, distribution(strategy, lengths)) > LEVEL


def test_her_ratio_is_the_same():
    rb = make_buffer("future", (12, 1, 2, 5), her_ratio=0.3)
    rb.transform[0].compile(fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    share = rb.sample(10_000)["hindsight", "relabelled"].float().mean()
    assert abs(share - 0.3) < 4 * (0.3 * 0.7 / 10_000) ** 0.5


def test_a_table_that_is_too_small_is_told_of_all_the_same():
    rb = buffer(HERTransform(REWARDS["GoalReward"], capacity=30))
    rb.transform[0].compile(fullgraph=True, backend="eager")

    def write_and_sample():
        for written in collected(400).split(10):
            rb.extend(written)
            rb.transform(some(rb, 500))

    with pytest.warns(UserWarning, match="left the goal table"):
        write_and_sample()


@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_a_compiled_transform_relabels_from_its_own_table(make_copy):
    rb = buffer(HERTransform(REWARDS["GoalReward"], her_ratio=1.0, capacity=100))
    rb.transform[0].compile(fullgraph=True, backend="eager")
    twin = make_copy(rb)
    twin.extend(collected())
    assert check(twin.sample(), "future", "GoalReward").share > 0.5


# Host synchronisation


class Waits(AssertionError):
    """The host waits for the value of a tensor."""


class NoWaits(TorchDispatchMode):
    """Raises where a device would have to be waited for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        by_mask = "index" in name and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
            for indices in args[1:]
            if isinstance(indices, (list, tuple))
            for index in indices
        )
        values = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "repeat_interleave.Tensor")
        if by_mask or any(value in name.removeprefix("aten.").split("_out")[0] for value in values):
            raise Waits(name)
        return func(*args, **(kwargs or {}))


@each_half
def test_sampling_waits_for_no_value(strategy, reward, sequence_length):
    her = HERTransform(REWARDS[reward], strategy=strategy, sequence_length=sequence_length)
    rb = buffer(her, collected())
    rows = some(rb)
    with NoWaits():
        batch = her(rows)
    assert check(batch, strategy, reward).share > 0.2


def test_sampling_n_step_returns_waits_for_no_value():
    reward = GoalReward(reward_of, terminated_fn=tape.reached)
    rb = buffer(Compose(MultiStepTransform(3, 0.9), HERTransform(reward)), collected())
    rows = some(rb)
    with NoWaits():
        batch = rb.transform(rows)
    assert batch["hindsight", "relabelled"].any()


class Waiting(GoalStrategy):
    """Chooses the transition's own step, in one of the ways that wait."""

    def __init__(self, way):
        self.way = way

    def select(self, choice):
        rows = choice.start + choice.step
        self.way(rows)
        return rows


def assign_by_mask(rows):
    rows[rows > 3] = rows[rows > 3]


@pytest.mark.parametrize(
    "way",
    [
        lambda rows: rows[0].item(),
        lambda rows: bool((rows > 0).any()),
        lambda rows: rows[rows > 3],
        assign_by_mask,
        lambda rows: rows.nonzero(),
        lambda rows: rows.unique(),
        lambda rows: torch.where(rows > 3),
        lambda rows: torch.masked_select(rows, rows > 3),
        lambda rows: torch.equal(rows, rows + 1),
    ],
    ids=["item", "branch", "mask", "assign", "nonzero", "unique", "where", "masked_select", "equal"],
)
def test_a_strategy_that_waits_is_found_out(way):
    rb = buffer(HERTransform(REWARDS["GoalReward"], strategy=Waiting(way)), collected())
    rows = some(rb)
    with pytest.raises(Waits), NoWaits():
        rb.transform(rows)
