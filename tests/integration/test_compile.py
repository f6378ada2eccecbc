"""Sampling compiles into one graph, only once, and never synchronizes a device with the host.

On the CPU, `NoWaits` rejects the operations that would synchronize; on CUDA, PyTorch's own debug mode does.
"""

import contextlib
import copy
import gc
import os
import pickle
import shutil
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import Compose, GymWrapper, MultiStepTransform, RewardScaling

from support import tape
from support.dispatch import NoWaits
from support.factories import make_buffer, make_transform
from support.goals import reached, reward_of
from support.losses import make_loss
from support.pages import run_block
from support.recorded import recorded_in
from support.tape import collected
from torchrl_her import EnvReward, Future, Geometric, GoalReward, Mixture, ReachedReward, SparseReward, Subgoal
from torchrl_her.envs import BitFlipping, PointReach

each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
needs_compiler = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler")


@pytest.fixture(autouse=True)
def forget_compiled_code():
    gc.collect()  # environments of earlier tests change the number of threads when they close, which dynamo refuses
    yield
    torch._dynamo.reset()


@contextlib.contextmanager
def no_synchronization_on_cuda():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


NO_SYNCHRONIZATION = {"cpu": NoWaits, "cuda": no_synchronization_on_cuda}


def buffer(*transforms, data=None, device="cpu"):
    writes = () if data is None else (data,)
    storage = partial(LazyTensorStorage, device=device)
    return make_buffer(Compose(*transforms), *writes, kind=ReplayBuffer, storage=storage, batch_size=64)


def stored_rows(rb, count=16, length=4):
    """Return random sequences of stored rows as the storage returns them, [count * length]."""
    begins = torch.randint(0, len(rb) - length + 1, (count, 1))
    return rb.storage[(begins + torch.arange(length)).flatten()]


MIXTURE = Mixture(dict.fromkeys(["current", Geometric(0.9), "random", "past_desired", Future(own=False)], 0.2))
SUBGOALS = {
    "desired_goal": MIXTURE,
    "actor_goal": MIXTURE,
    "subgoal": Subgoal(2),
    "limited": Subgoal(2, limit="subgoal"),
}
EXTRA = {"reward": ReachedReward(), "strategy": SUBGOALS, "info": True, "capacity": 1000, "her_ratio": 1.0}
CASES = {
    "future": {"reward": SparseReward(0.0)},
    "final": {"reward": SparseReward(0.0, terminated_fn=reached), "strategy": "final"},
    "episode, sequences": {"reward": GoalReward(reward_of), "strategy": "episode", "sequence_length": 4},
    "random": {"strategy": "random"},
    "random, sequences": {"strategy": "random", "sequence_length": 4},
    "n-step returns": {},
    "mixture and extra goals": EXTRA,
}


def check(batch, her, strategy="future", n_step=None, **_):
    """Check a batch with the tape, and the rewards that the tape does not have here; return the relabelled share."""
    batch = batch.cpu().clone()
    relabelled = batch["hindsight", "relabelled"]
    is_reached = reached(batch["next", "achieved_goal"], batch["desired_goal"])
    if isinstance(her.reward, (SparseReward, ReachedReward)):
        assert torch.equal(batch["next", "reward"][relabelled], (is_reached[:, None].float() - 1.0)[relabelled])
        batch["next", "reward"] = reward_of(batch["next", "achieved_goal"], batch["desired_goal"]).unsqueeze(-1)
    if her.strategies["desired_goal"] is MIXTURE:  # some goals are desired goals, which the tape does not expect
        steps, is_new = batch["hindsight", "steps_to_goal"][:, 0], relabelled[:, 0]
        assert torch.equal(is_reached[is_new], (steps == 0)[is_new])
        assert torch.equal(batch["limited"][is_new], batch["subgoal"][is_new])
        assert torch.equal(batch["subgoal"], batch["next", "subgoal"])
        is_near = is_new & (steps >= 0) & (steps <= 2)
        assert torch.equal(batch["subgoal"][is_near], batch["desired_goal"][is_near])
        return float(is_new.double().mean())
    return tape.check(batch, strategy, flags=("next", "terminated") in her.reward.out_keys, **(n_step or {}))


@pytest.mark.filterwarnings("ignore:The reward module gives", "ignore:.*longer in the goal table")
@each_device
@pytest.mark.parametrize("name", CASES)
def test_it_compiles_once_before_later_writes_and_does_not_synchronize(name, device):
    goal_spec = tape.make_tape().observation_spec["achieved_goal"].to(device)
    her = make_transform(**{"capacity": 120, "goal_spec": goal_spec} | CASES[name])
    n_step = {"n": 3, "gamma": 0.5} if name == "n-step returns" else None
    rb = buffer(*([MultiStepTransform(3, 0.5)] if n_step else []), her, device=device)
    graphs, shares = CompileCounter(), []
    relabel = torch.compile(rb.transform, fullgraph=True, backend=graphs)
    for written in collected(400).to(device).split(50):  # a goal table with 120 rows wraps round three times
        rb.extend(written)
        rows = stored_rows(rb)
        with NO_SYNCHRONIZATION[device]():
            batch = rb.transform(rows)
        for relabelled in (batch, relabel(rows)):
            assert all(value.device.type == device for value in relabelled.values(True, True))
            shares.append(check(relabelled, her, n_step=n_step, **CASES[name]))
    assert graphs.frame_count == 1
    assert sum(shares) > 0.2 * len(shares)  # most goals have left the table


@pytest.mark.parametrize("env", [PointReach, BitFlipping])
def test_rewards_of_the_environments_compile(env):
    env = GymWrapper(env())
    rb = buffer(make_transform(reward=EnvReward(env)), data=env.rollout(100, break_when_any_done=False))
    rows, compiled = stored_rows(rb), torch.compile(rb.transform, fullgraph=True, backend="eager")
    batches = []
    for relabel in (compiled, rb.transform):
        torch.manual_seed(0)
        batches.append(relabel(rows))
    assert (batches[0] == batches[1]).all()
    assert batches[0]["hindsight", "relabelled"].any()


def test_batches_of_other_sizes_compile_it_once_more_at_most():
    rb, graphs = buffer(make_transform(capacity=1000), data=collected()), CompileCounter()
    relabel = torch.compile(rb.transform, fullgraph=True, backend=graphs)
    for count in (16, 8, 3, 20, 16):
        check(relabel(stored_rows(rb, count)), rb.transform[0])
    assert graphs.frame_count == 2


def test_a_transform_that_breaks_the_graph_stays_outside_and_copies_relabel_from_their_own_tables():
    her = make_transform(capacity=1000)
    rb = buffer(her, RewardScaling(0.0, 0.5, in_keys=[("next", "reward")]), data=collected())
    her.compile(fullgraph=True, backend="eager")
    for each in (rb, copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))):
        each.extend(collected())
        batch = each.sample()
        batch["next", "reward"] *= 2.0
        assert check(batch, her) > 0.5


@pytest.mark.slow  # compiling takes longer than 20 s
@needs_compiler
@pytest.mark.filterwarnings("ignore:No target network updater")
def test_the_code_of_the_page_compiles_the_loss():
    her = make_transform(capacity=1000)
    names = {"her": her, "rb": buffer(her, data=collected(600, discrete=True)), "loss": make_loss("DQNLoss")}
    run_block("reference/losses-and-transforms", 0, names)
    assert all(parameter.grad.isfinite().all() for parameter in names["loss"].parameters() if parameter.requires_grad)


@needs_compiler
@pytest.mark.parametrize("strategy", ["future", "random"])
def test_compiled_draws_have_the_right_share_and_distribution(strategy):
    her = make_transform(strategy=strategy, her_ratio=0.8, capacity=1000)
    recorded = recorded_in(buffer(her), 1, strategy)
    recorded.play([[*["go"] * 11, "truncated", "terminated", "go", "truncated"]])
    her.compile(fullgraph=True)
    batch = recorded.rb.transform(recorded.rb.storage[torch.arange(15).repeat_interleave(2000)])
    recorded.check(batch[::50])
    assert recorded.p_value(batch) > 1e-3


def test_a_compiled_transform_still_warns_of_a_table_that_is_too_small():
    rb = buffer(make_transform(capacity=30))
    rb.transform[0].compile(fullgraph=True, backend="eager")
    with pytest.warns(UserWarning, match="no longer in the goal table"):  # noqa: PT031
        for written in collected(400).split(10):
            rb.extend(written)
            rb.transform(stored_rows(rb, 500))
