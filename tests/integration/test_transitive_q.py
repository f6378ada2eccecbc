"""TorchRL's transitive Q-learning reads goals and subgoals that HERTransform draws.

`TransitiveQLoss` is in no release that the package is tested with, so only the weekly job runs this test.
"""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl import objectives
from torchrl.data import TensorDictReplayBuffer, TensorStorage
from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor

from torchrl_her import Geometric, GoalStrategy, HERKeys, HERTransform, uniform

if not hasattr(objectives, "TransitiveQLoss"):
    pytest.skip("this TorchRL has no TransitiveQLoss: install torchrl-nightly", allow_module_level=True)

pytestmark = pytest.mark.newest

EPISODES, STEPS, STATE, ACTION, GAMMA = 6, 30, 3, 2, 0.9


class Between(GoalStrategy):
    """A state after the transition's own and before the goal, or the goal itself if there is none."""

    refers_to = ("desired_goal",)

    def select(self, transitions):
        _, goal = transitions.drawn["desired_goal"]
        return transitions.episode, uniform(transitions.step, torch.maximum(goal, transitions.step + 1))


def make_data():
    """Episodes whose achieved goal is a record: state, action and step."""
    steps = torch.arange(STEPS + 1.0).expand(EPISODES, -1).unsqueeze(-1)  # [episode, step, 1]
    states, actions = torch.randn(EPISODES, STEPS + 1, STATE), torch.rand(EPISODES, STEPS + 1, ACTION) * 2 - 1
    records = torch.cat([states, actions, steps], -1)
    ends = (steps[:, 1:] == STEPS).flatten(0, 1)
    flags = {"done": ends, "truncated": ends, "terminated": torch.zeros_like(ends)}
    return TensorDict(
        {"record": records[:, :-1].flatten(0, 1), "next": {"record": records[:, 1:].flatten(0, 1), **flags}},
        EPISODES * STEPS,
    )


def test_a_sample_with_a_subgoal_and_a_goal_of_the_actor_trains_both_networks():
    torch.manual_seed(0)
    data = make_data()
    strategies = {"desired_goal": Geometric(GAMMA), "subgoal": Between(), "actor_goal": Geometric(GAMMA)}
    her = HERTransform(
        None, strategy=strategies, her_ratio=1.0, capacity=len(data), keys=HERKeys(achieved_goal="record")
    )
    rb = TensorDictReplayBuffer(storage=TensorStorage(her.adopt(data)), transform=her, batch_size=64)
    sample = rb.sample()
    records = torch.stack([sample[key] for key in ("record", "subgoal", "desired_goal", "actor_goal")], 1)
    state, action, step = records.split([STATE, ACTION, 1], -1)  # [batch, 4, ...]
    offset = (step - step[:, :1]).squeeze(-1)
    batch = TensorDict({"observation": state, "action": action, "step_offset": offset.long()}, offset.shape)
    assert (offset[:, 1:] >= 1).all()
    assert ((offset[:, 1] < offset[:, 2]) | (offset[:, 1:3] == 1).all(1)).all()

    actor = ProbabilisticActor(
        TensorDictModule(MLP(2 * STATE, ACTION, num_cells=[16]), ["observation", "goal"], ["loc"]),
        in_keys=["loc"],
        distribution_class=IndependentNormal,
        distribution_kwargs={"scale": 1.0},
    )
    inputs = ["observation", "goal", "action"]
    critic = TensorDictModule(MLP(2 * STATE + ACTION, 1, num_cells=[16]), inputs, ["state_action_value"])
    loss = objectives.TransitiveQLoss(actor, critic, num_qvalue_nets=1, discount=GAMMA, expectile=0.7)
    values = loss(batch)
    (values["loss_qvalue"] + values["loss_actor"]).backward()
    for params in (loss.actor_network_params, loss.qvalue_network_params):
        assert all(parameter.grad.any() for parameter in params.parameters())
