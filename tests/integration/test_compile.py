"""Sampling compiles into one graph, only once, and never synchronizes a device with the host.

On the CPU, `NoWaits` rejects the operations that would synchronize; on CUDA, PyTorch's own debug mode does.
"""

import contextlib
import copy
import functools
import os
import pickle
import shutil

import pytest
import torch
from tensordict import TensorDict
from torch._dynamo.testing import CompileCounter
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import CatTensors, Compose, GymWrapper, MultiStepTransform, ObservationNorm, RewardScaling

from support import tape
from support.dispatch import NoWaits, Waits
from support.draws import LEVEL, RIGHT, distribution, draw, draws_needed, make_buffer, p_value
from support.goals import reached, reward_of
from support.losses import make_loss
from support.pages import run_block
from support.tape import collected
from torchrl_her import (
    Current,
    EnvReward,
    Future,
    Geometric,
    GoalReward,
    HERTransform,
    Mixture,
    PastDesired,
    Random,
    ReachedReward,
    SparseReward,
    Subgoal,
)
from torchrl_her.envs import BitFlipping, PointReach

REWARDS = {
    "SparseReward": SparseReward(0.0),
    "SparseReward, terminated_fn": SparseReward(0.0, terminated_fn=reached),
    "GoalReward": GoalReward(reward_of),
    "GoalReward, terminated_fn": GoalReward(reward_of, terminated_fn=reached),
}
GOAL_REWARD = REWARDS["GoalReward"]
TERMINATING = REWARDS["GoalReward, terminated_fn"]
CASES = [
    *[("future", reward, None) for reward in REWARDS],
    *[(strategy, "SparseReward, terminated_fn", None) for strategy in RIGHT[1:]],
    *[(strategy, "GoalReward", 4) for strategy in RIGHT],
]
each_case = pytest.mark.parametrize(("strategy", "reward", "sequence_length"), CASES)

has_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
on_cuda = functools.partial(pytest.param, marks=[pytest.mark.gpu, has_cuda])
each_device = pytest.mark.parametrize("device", ["cpu", on_cuda("cuda")])
needs_compiler = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler")


@pytest.fixture(autouse=True)
def forget_compiled_code():
    yield
    torch._dynamo.reset()


def buffer(transform, data=None, device="cpu", **options):
    storage = LazyTensorStorage(1000, device=device, **options)
    rb = TensorDictReplayBuffer(storage=storage, transform=transform, batch_size=64, **options)
    if data is not None:
        rb.extend(data)
    return rb


def stored_rows(rb, count=16, length=4):
    """Return random sequences of stored rows as the storage returns them, [count * length]."""
    begins = torch.randint(0, len(rb) - length + 1, (count, 1))
    return rb.storage[(begins + torch.arange(length)).flatten()]


def check(batch, strategy="future", reward="GoalReward, terminated_fn"):
    """Check a batch with the oracle, and rewards of `SparseReward`, which the environment does not have, here."""
    batch = batch.cpu()
    if "SparseReward" in reward:
        batch = batch.clone()
        relabelled = batch["hindsight", "relabelled"]
        goals = batch["next", "achieved_goal"], batch["desired_goal"]
        expected = reached(*goals).unsqueeze(-1).float() - 1.0
        assert torch.equal(batch["next", "reward"][relabelled], expected[relabelled])
        batch["next", "reward"] = reward_of(*goals).unsqueeze(-1)
    return tape.check(batch, strategy, flags="terminated_fn" in reward)


# Compilation


def goal_spec(device):
    return tape.make_tape().observation_spec["achieved_goal"].to(device)


def check_while_written(relabel, rb, strategy, reward):
    """Check later samples, while a table of 120 goals wraps round three times."""
    count = tape.Count()
    for written in collected(400).split(20):
        rb.extend(written)
        count += check(relabel(stored_rows(rb)), strategy, reward)
    rb.transform[0].flush()
    count += check(relabel(stored_rows(rb)), strategy, reward)
    assert count.share > 0.2  # most goals have left the table


@each_device
@each_case
def test_it_compiles_into_one_graph_and_later_writes_do_not_recompile_it(strategy, reward, sequence_length, device):
    options = {"strategy": strategy, "sequence_length": sequence_length, "capacity": 120}
    her = HERTransform(REWARDS[reward], **options, goal_spec=goal_spec(device))
    graphs = CompileCounter()
    relabel = torch.compile(her, fullgraph=True, backend=graphs)
    check_while_written(relabel, buffer(her, device=device), strategy, reward)
    assert graphs.frame_count == 1


def with_extra_goals(device):
    """Return a transform with every strategy and every additional entry."""
    members = dict.fromkeys([Current(), Geometric(0.9), Random(), PastDesired(), Future(own=False)], 0.2)
    extra_goals = {"actor_goal": Mixture(members), "subgoal": Subgoal(2), "next_subgoal": Subgoal(2, limit="subgoal")}
    options = {"strategy": Mixture(members), "extra_goals": extra_goals, "info": True, "her_ratio": 1.0}
    return HERTransform(ReachedReward(), **options, capacity=1000, goal_spec=goal_spec(device))


def check_extra_goals(batch):
    """Check that entries are consistent, and compare goals with the expected outcomes."""
    steps, relabelled = batch["hindsight", "steps_to_goal"], batch["hindsight", "relabelled"]
    assert relabelled.float().mean() > 0.5
    is_own = (batch["next", "achieved_goal"] == batch["desired_goal"]).all(-1, keepdim=True)
    assert is_own[steps == 0].all()
    assert torch.equal(batch["next", "terminated"][relabelled], steps[relabelled] == 0)
    assert torch.equal(batch["next", "reward"][relabelled], (steps[relabelled] == 0).float() - 1)
    for name in ("actor_goal", "subgoal", "next_subgoal"):
        assert torch.equal(batch[name], batch["next", name])
        assert (batch[name] == batch["desired_goal"])[~relabelled.expand_as(batch[name])].all()
    limited = relabelled & (steps >= 0) & (steps <= 2)
    assert (batch["subgoal"] == batch["desired_goal"])[limited.expand_as(batch["subgoal"])].all()
    assert torch.equal(batch["subgoal"][relabelled[:, 0]], batch["next_subgoal"][relabelled[:, 0]])


@each_device
def test_mixtures_and_extra_goals_compile_into_one_graph_and_do_not_synchronize(device):
    her = with_extra_goals(device)
    graphs = CompileCounter()
    relabel = torch.compile(her, fullgraph=True, backend=graphs)
    rb = buffer(her, device=device)
    for written in collected(400).split(100):
        rb.extend(written)
        rows = stored_rows(rb, 100)
        check_extra_goals(relabel(rows))
        with NO_SYNCHRONIZATION[device]():
            batch = her(rows)
        check_extra_goals(batch)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("strategy", [on_cuda("future"), on_cuda("random")])
def test_its_kernels_for_the_device_relabel_correctly(strategy):
    reward = "SparseReward, terminated_fn"
    her = HERTransform(REWARDS[reward], strategy=strategy, goal_spec=goal_spec("cuda"), capacity=120)
    check_while_written(torch.compile(her, fullgraph=True), buffer(her, device="cuda"), strategy, reward)


def with_n_step_returns():
    return buffer(Compose(MultiStepTransform(3, 0.9), HERTransform(TERMINATING, her_ratio=1.0)), collected())


def with_the_reward_of(env):
    env = GymWrapper(env())
    return buffer(HERTransform(EnvReward(env)), env.rollout(100, break_when_any_done=False))


@pytest.mark.parametrize(
    "make",
    [with_n_step_returns, lambda: with_the_reward_of(PointReach), lambda: with_the_reward_of(BitFlipping)],
    ids=["n-step returns", "PointReach", "BitFlipping"],
)
def test_it_compiles_together_with_n_step_returns_and_with_rewards_of_environments(make):
    rb = make()
    rows, graphs = stored_rows(rb), CompileCounter()
    relabel = torch.compile(rb.transform, fullgraph=True, backend=graphs)
    for _ in range(3):
        torch.manual_seed(0)
        compiled = relabel(rows)
        torch.manual_seed(0)
        assert (compiled == rb.transform(rows)).all()
    assert compiled["hindsight", "relabelled"].any()
    assert graphs.frame_count == 1


def test_batches_of_other_sizes_compile_it_once_more_at_most():
    rb = buffer(HERTransform(GOAL_REWARD), collected())
    graphs = CompileCounter()
    relabel = torch.compile(rb.transform, fullgraph=True, backend=graphs)
    for count in (16, 8, 3, 20, 16):
        check(relabel(stored_rows(rb, count)), reward="GoalReward")
    assert graphs.frame_count == 2


def test_it_compiles_together_with_the_transforms_around_it():
    cat = CatTensors(in_keys=["observation", "desired_goal"], out_key="both", del_keys=False, sort=False)
    rb = buffer(Compose(HERTransform(TERMINATING), cat), collected())
    batch = torch.compile(rb.transform, fullgraph=True, backend="eager")(stored_rows(rb))
    assert check(batch).share > 0.5
    assert torch.equal(batch["both"], torch.cat([batch["observation"], batch["desired_goal"]], dim=-1))


@pytest.mark.parametrize("transform", [RewardScaling, ObservationNorm])
def test_some_transforms_break_the_graph_by_themselves(transform):
    """TorchRL's own transforms keep a flag in a tensor. HERTransform compiles separately."""
    rewards = TensorDict({"reward": torch.ones(4, 1)}, batch_size=4)
    alone = torch.compile(transform(0.0, 0.5, in_keys=["reward"]), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="standard_normal"):
        alone(rewards)
    rb = buffer(Compose(HERTransform(GOAL_REWARD), transform(0.0, 0.5, in_keys=[("next", "reward")])), collected())
    rb.transform[0].compile(fullgraph=True, backend="eager")
    batch = rb.sample()
    batch["next", "reward"] *= 2.0
    assert check(batch, reward="GoalReward").share > 0.5


@pytest.mark.parametrize("transform", [None, HERTransform(GOAL_REWARD)], ids=["no transform", "hindsight"])
def test_a_buffer_acquires_a_lock_that_does_not_compile(transform):
    """It is TorchRL's lock, with compilable=True and without."""
    rb = buffer(transform, collected(), compilable=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="RLock"):
        torch.compile(rb.sample, fullgraph=True, backend="eager")()


@pytest.mark.filterwarnings("ignore:No target network updater")
def test_it_compiles_together_with_the_loss():
    her = HERTransform(TERMINATING)
    rb = buffer(her, collected(discrete=True))
    loss = make_loss("DQNLoss")

    def update(rows):
        batch = her(rows)
        return loss(batch)["loss"], batch

    compiled = torch.compile(update, fullgraph=True, backend="eager")
    for _ in range(2):
        value, batch = compiled(stored_rows(rb))
        assert check(batch).share > 0.5
        torch.testing.assert_close(value, loss(batch)["loss"])
        value.backward()


@pytest.mark.slow  # compiling takes longer than 20 s
@needs_compiler
@pytest.mark.filterwarnings("ignore:No target network updater")
def test_the_code_of_the_page_compiles_the_loss():
    her = HERTransform(TERMINATING)
    names = {"her": her, "rb": buffer(her, collected(600, discrete=True)), "loss": make_loss("DQNLoss")}
    run_block("reference/losses-and-transforms", 0, names)
    assert all(parameter.grad.isfinite().all() for parameter in names["loss"].parameters() if parameter.requires_grad)


@pytest.mark.parametrize(
    ("strategy", "backend"),
    [
        pytest.param("future", "inductor", marks=needs_compiler),
        pytest.param("random", "inductor", marks=needs_compiler),
        ("final", "aot_eager"),
        ("episode", "aot_eager"),
    ],
)
def test_compiled_draws_have_the_same_distribution(strategy, backend):
    lengths = (12, 1, 2, 5)
    rb = make_buffer(strategy, lengths)
    rb.transform[0].compile(fullgraph=True, backend=backend)
    count = draws_needed(strategy, lengths)
    draws = draw(rb, count)
    assert len(draws) == count
    assert p_value(draws, distribution(strategy, lengths)) > LEVEL


def test_a_compiled_transform_relabels_the_same_share():
    rb = make_buffer("future", (12, 1, 2, 5), her_ratio=0.3)
    rb.transform[0].compile(fullgraph=True, backend="aot_eager")
    share = rb.sample(10_000)["hindsight", "relabelled"].float().mean()
    assert abs(share - 0.3) < 4 * (0.3 * 0.7 / 10_000) ** 0.5


def test_a_table_that_is_too_small_still_warns():
    rb = buffer(HERTransform(GOAL_REWARD, capacity=30))
    rb.transform[0].compile(fullgraph=True, backend="eager")
    with pytest.warns(UserWarning, match="left the goal table"):  # noqa: PT031
        for written in collected(400).split(10):
            rb.extend(written)
            rb.transform(stored_rows(rb, 500))


@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_a_compiled_transform_relabels_from_its_own_table(make_copy):
    rb = buffer(HERTransform(GOAL_REWARD, her_ratio=1.0, capacity=100))
    rb.transform[0].compile(fullgraph=True, backend="eager")
    twin = make_copy(rb)
    twin.extend(collected())
    assert check(twin.sample(), reward="GoalReward").share > 0.5


# Host synchronization


@contextlib.contextmanager
def no_synchronization_on_cuda():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


NO_SYNCHRONIZATION = {"cpu": NoWaits, "cuda": no_synchronization_on_cuda}


@pytest.mark.parametrize(("device", "written_from"), [("cpu", "cpu"), on_cuda("cuda", "cuda"), on_cuda("cuda", "cpu")])
@each_case
def test_sampling_does_not_synchronize(strategy, reward, sequence_length, device, written_from):
    her = HERTransform(REWARDS[reward], strategy=strategy, sequence_length=sequence_length, capacity=120)
    rb = buffer(her, device=device)
    count = tape.Count()
    for written in collected(400).to(written_from).split(50):  # the table wraps round three times
        rb.extend(written)
        rows = stored_rows(rb)
        her(rows)  # the first sample moves the table to the device of the storage
        with NO_SYNCHRONIZATION[device]():
            batch = her(rows)
        assert all(value.device.type == device for value in batch.values(True, True))
        count += check(batch, strategy, reward)
    assert her.table.goals.device.type == device
    assert count.share > 0.2  # most goals have left the table


@each_device
def test_the_first_sample_does_not_synchronize_if_goal_spec_is_on_the_device(device):
    her = HERTransform(TERMINATING, goal_spec=goal_spec(device), capacity=1000)
    rb = buffer(her, collected(), device=device)
    assert her.table.goals.device.type == device
    rows = stored_rows(rb)
    with NO_SYNCHRONIZATION[device]():
        batch = her(rows)
    assert check(batch).share > 0.5


@each_device
def test_sampling_n_step_returns_does_not_synchronize(device):
    her = HERTransform(TERMINATING, capacity=1000)
    rb = buffer(Compose(MultiStepTransform(3, 0.9), her), collected().to(device), device=device)
    rows = stored_rows(rb)
    rb.transform(rows)
    with NO_SYNCHRONIZATION[device]():
        batch = rb.transform(rows)
    assert batch["hindsight", "relabelled"].any()


def assign_by_mask(rows):
    rows[rows > 3] = rows[rows > 3]


SYNCHRONIZING = {
    "item": lambda rows: rows[0].item(),
    "mask": lambda rows: rows[rows > 3],
    "branch": lambda rows: bool((rows > 0).any()),
    "assign": assign_by_mask,
    "nonzero": lambda rows: rows.nonzero(),
    "unique": lambda rows: rows.unique(),
    "where": lambda rows: torch.where(rows > 3),
    "masked_select": lambda rows: torch.masked_select(rows, rows > 3),
    "equal": lambda rows: torch.equal(rows, rows + 1),
}


@pytest.mark.parametrize(
    ("device", "way"),
    [*(("cpu", way) for way in SYNCHRONIZING), on_cuda("cuda", "item"), on_cuda("cuda", "mask")],
)
def test_an_operation_that_synchronizes_is_found(device, way):
    rows = torch.arange(8, device=device)
    failure = {"cpu": pytest.raises(Waits), "cuda": pytest.raises(RuntimeError, match="synchroniz")}[device]
    with failure, NO_SYNCHRONIZATION[device]():
        SYNCHRONIZING[way](rows)
