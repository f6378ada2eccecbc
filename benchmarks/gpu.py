r"""Measures hindsight on a GPU, in two minutes, and prints four tables.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --device cpu    # the same with small sizes, in less than a minute

- ``sample``: the time of a sample on the device, with and without hindsight, call by call and as one CUDA graph.
- ``synchronizations``: how often a call waits for the device. Fails if sampling with hindsight waits.
- ``loop``: trains DDPG on PointReach with 4,096 environments on the device, and sampling and updates in a CUDA graph.
- ``profile``: the operators of samples and of a write, by PyTorch's profiler.

Needs PyTorch 2.11, TorchRL 0.14, tensordict 0.14, Gymnasium and tqdm, or newer ones. This package need not be
installed. For a machine without network access, download the missing packages on another one (here for Python 3.12):

    python -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --dest wheels \
        torchrl==0.14.1 tensordict==0.14.3 gymnasium==1.4.0 orjson importlib-metadata zipp lazy-importer \
        cloudpickle hoptorch pyvers farama-notifications
    python -m pip install --no-index --no-deps --target site wheels/*.whl    # on the machine with the GPU
    PYTHONPATH=site python benchmarks/gpu.py
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))  # torchrl_her need not be installed
sys.path.append(str(Path(__file__).parents[1] / "examples"))

from batched_point_reach import BatchedPointReach
from buffers import PAIRS, THRESHOLD, make_blocks, make_episodes
from measuring import Turn, cell, print_table, print_versions, set_up, take_turns, timed
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.modules import MLP

import torchrl_her as her

GAMMA, TAU, LEARNING_RATE, HIDDEN, NOISE, RANDOM_ACTIONS = 0.95, 0.05, 1e-3, [128, 128], 0.2, 0.2  # plain_ddpg
INPUTS = ["observation", "achieved_goal", "desired_goal"]
BATCH_SIZE, STEPS_PER_UPDATE, UPDATES_PER_GRAPH = 256, 16, 25
STORAGES = dict(zip(PAIRS, (LazyTensorStorage, her.PackedStorage), strict=True))
STRATEGIES = {
    "no hindsight": None,
    **{name: name for name in ("future", "final", "episode", "random", "past_desired")},
    "Geometric(0.99)": her.Geometric(0.99),
    "Mixture": her.Mixture({her.Current(): 0.2, her.Geometric(0.99): 0.5, her.Random(): 0.3}),
}


@dataclass(frozen=True)
class Plan:
    """The sizes of the measurements."""

    stored: tuple[int, ...] = (1_000_000, 10_000_000)
    batch_sizes: tuple[int, ...] = (256, 4096, 65_536)
    rounds: int = 10
    calls: int = 50  # in a turn, without waiting for the device in between
    num_envs: int = 4096
    steps: int = 2_000_000
    seconds: float = 60.0  # of the loop, at most


SMALL = Plan(stored=(1000, 10_000), batch_sizes=(64, 256), rounds=2, calls=3, num_envs=40, steps=10_000, seconds=10.0)


def as_graph(function: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Capture a function in one CUDA graph, after three calls. On a CPU, return the function.

    The function must read and write tensors that stay in place. Python numbers are constants of the graph, such as the
    number of stored transitions.
    """
    if device.type != "cuda":
        return function
    stream = torch.cuda.Stream()  # a capture cannot use the default stream, so neither do the first calls
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def make_buffer(storage: Any, size: int, device: torch.device, **options: Any) -> TensorDictReplayBuffer:
    """Return an empty buffer, with hindsight if options of the transform are given."""
    transform = her.HERTransform(her.SparseReward(THRESHOLD), capacity=size, **options) if options else None
    return TensorDictReplayBuffer(storage=storage(size, device=device), transform=transform)


def sample(plan: Plan, device: torch.device) -> None:
    """Print the times of samples, and their ratios to TorchRL's buffer without hindsight."""

    def turn(buffer: TensorDictReplayBuffer, in_graph: bool) -> Turn:
        calls = {size: partial(buffer.sample, size) for size in plan.batch_sizes}
        calls = {size: as_graph(call, device) if in_graph else call for size, call in calls.items()}
        return lambda _: (
            (size, timed(repeat, call, plan.calls, device)[0] / plan.calls) for size, call in calls.items()
        )

    for stored in plan.stored:
        buffers = {}
        for label, storage in STORAGES.items():
            for suffix, options in (("no hindsight", {}), ("`HERTransform`", {"strategy": "future"})):
                buffer = buffers[f"{label}, {suffix}"] = make_buffer(storage, stored, device, **options)
                for transitions in make_blocks(stored, device):
                    buffer.extend(transitions)
                buffer.sample(BATCH_SIZE)  # moves the goal table to the device
        for mode in ("call by call", "as one CUDA graph"):
            turns = {name: turn(buffer, mode != "call by call") for name, buffer in buffers.items()}
            times = take_turns(turns, plan.rounds, unmeasured=1)
            plain, columns = next(iter(buffers)), (f"`sample({size})`" for size in plan.batch_sizes)
            rows = {name: [cell(times[s, name], times[s, plain], 1) for s in plan.batch_sizes] for name in buffers}
            print_table(f"µs {mode}, {stored:,} stored", columns, rows)


def repeat(call: Callable[[], Any], count: int, device: torch.device) -> None:
    """Call a function several times, and then wait until the device has finished."""
    for _ in range(count):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def synchronizations(plan: Plan, device: torch.device) -> None:
    """Print how often calls wait for the device. Exit if sampling with hindsight does."""
    rows: dict[str, list[str]] = {}
    data = make_episodes(80, device)
    for storage in STORAGES.values():
        calls: dict[str, Callable[[], Any]] = {"`tensor.item()`, which waits": torch.ones((), device=device).item}
        for name, strategy in STRATEGIES.items():
            buffer = make_buffer(storage, 10_000, device, **({"strategy": strategy} if strategy else {}))
            buffer.extend(data.copy())
            calls[f"`sample(256)`, {name}"] = partial(buffer.sample, 256)
            if name in ("no hindsight", "future"):
                calls[f"`extend(4000)`, {name}"] = partial(write, buffer, data)
        for name, call in calls.items():
            rows.setdefault(name, []).append(waits(call, device, plan.calls))
    print_table("synchronizations per call", STORAGES, rows)
    if failures := [name for name, found in rows.items() if "sample" in name and {*found} - {"0", "-"}]:
        raise AssertionError(f"sampling waits for the device: {', '.join(failures)}")


def write(buffer: TensorDictReplayBuffer, data: TensorDict) -> None:
    buffer.extend(data.copy())


def waits(call: Callable[[], Any], device: torch.device, calls: int) -> str:
    """Return how often a call waits for the device, or "-" on a CPU."""
    repeat(call, 1, device)
    if device.type != "cuda":
        return "-"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(calls):
                call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return f"{sum('synchroniz' in str(each.message) for each in caught) / calls:g}"


class Learner:
    """DDPG with ``+task=plain_ddpg`` of ``examples/ddpg.py``, without normalization, with an update for CUDA graphs."""

    def __init__(self, transitions: TensorDictBase):
        device = transitions.device
        width, actions = inputs_of(transitions).shape[-1], transitions["action"].shape[-1]
        make = partial(MLP, num_cells=HIDDEN, activation_class=nn.ReLU, device=device)
        self.actor, self.critic = nn.Sequential(make(width, actions), nn.Tanh()), make(width + actions, 1)
        self.networks = nn.ModuleList([self.actor, self.critic])
        self.targets = deepcopy(self.networks).requires_grad_(False)
        options = {"lr": LEARNING_RATE, "fused": True, "capturable": device is not None and device.type == "cuda"}
        self.optimizers = [torch.optim.Adam(network.parameters(), **options) for network in self.networks]

    def update(self, batch: TensorDictBase) -> None:
        """Take one step of gradient descent on a batch ``[n]``."""
        inputs, following, (actor, critic) = inputs_of(batch), inputs_of(batch["next"]), self.targets
        value = batch["next", "reward"] + GAMMA * critic(torch.cat([following, actor(following)], -1))
        error = self.critic(torch.cat([inputs, batch["action"]], -1)) - value.clamp(-1 / (1 - GAMMA), 0.0)
        value_of_actor = self.critic(torch.cat([inputs, self.actor(inputs)], -1))
        for network, loss in ((self.actor, -value_of_actor.mean()), (self.critic, error.square().mean())):
            parameters = list(network.parameters())
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            for target, parameter in zip(self.targets.parameters(), self.networks.parameters(), strict=True):
                target.lerp_(parameter, TAU)

    def policy(self, explores: bool) -> TensorDictModule:
        """Return the policy, with Gaussian noise and random actions if it explores."""

        def act(*inputs: Tensor) -> Tensor:
            action = self.actor(torch.cat(inputs, -1))
            if not explores:
                return action
            noisy = (action + NOISE * torch.randn_like(action)).clamp(-1.0, 1.0)
            is_random = torch.rand(*action.shape[:-1], 1, device=action.device) < RANDOM_ACTIONS
            return torch.where(is_random, 2 * torch.rand_like(action) - 1, noisy)

        return TensorDictModule(act, INPUTS, ["action"])


def inputs_of(transitions: TensorDictBase) -> Tensor:
    return torch.cat([transitions[key] for key in INPUTS], -1)


def loop(plan: Plan, device: torch.device) -> None:
    """Train: each round plays one episode of each environment, and then makes an update for every 16 steps."""
    env, test_env = (BatchedPointReach(count, device=device, seed=count) for count in (plan.num_envs, 1000))
    buffer = make_buffer(her.PackedStorage, 5 * 50 * plan.num_envs, device, strategy="future")
    learner = Learner(env.rollout(1).reshape(-1))
    seconds = dict.fromkeys(("collecting", "writing", "updating"), 0.0)
    rounds = -(-plan.steps // (50 * plan.num_envs))

    def clocked(part: str, function: Callable[[], Any]) -> Any:
        results: list[Any] = []
        seconds[part] += timed(repeat, lambda: results.append(function()), 1, device)[0] / 1e6
        return results[0]

    play = torch.no_grad()(partial(BatchedPointReach.rollout, max_steps=50, break_when_any_done=False))

    def update() -> None:
        for batch in buffer.sample(BATCH_SIZE * UPDATES_PER_GRAPH).split(BATCH_SIZE):
            learner.update(batch)

    stored, graph, updates = 0, update, 50 * plan.num_envs // STEPS_PER_UPDATE // UPDATES_PER_GRAPH
    for number in range(1, rounds + 1):
        policy = learner.policy(explores=True) if number > 1 else None  # the first actions are random
        episodes = clocked("collecting", partial(play, env, policy=policy))
        clocked("writing", partial(buffer.extend, episodes.reshape(-1)))
        if stored != len(buffer):  # the graph contains the number of stored transitions
            stored, graph = len(buffer), clocked("updating", partial(as_graph, update, device))
        clocked("updating", partial(repeat, graph, updates, device))
        if (total := sum(seconds.values())) > plan.seconds:
            break
    reward = play(test_env, policy=learner.policy(explores=False))["next", "reward"][:, -1]
    cells = [f"{number * 50 * plan.num_envs:,}", f"{number * 50 * plan.num_envs / total:,.0f}"]
    cells += [f"{number * updates * UPDATES_PER_GRAPH / total:,.0f}", *(f"{part:.1f}" for part in seconds.values())]
    cells += [f"{(reward == 0).float().mean():.2f}"]
    columns = "steps", "steps per second", "updates per second", *(f"{part}, s" for part in seconds), "success"
    print_table("environments", columns, {f"{plan.num_envs:,}": cells})


def profile_calls(plan: Plan, device: torch.device) -> None:
    """Print the operators of samples and a write with hindsight that take most time."""
    buffer, data = make_buffer(her.PackedStorage, 100_000, device, strategy="future"), make_episodes(80, device)
    write(buffer, data)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    calls = {"sample(256)": partial(buffer.sample, 256), "extend(4000)": partial(write, buffer, data)}
    for name, call in calls.items():
        repeat(call, 1, device)
        with profile(activities=activities) as profiler:
            repeat(call, 10, device)
        print(f"\nProfile of ten calls of {name}\n")
        print(
            profiler.key_averages().table(
                sort_by=f"self_{device.type}_time_total", row_limit=12, max_name_column_width=40
            )
        )


PARTS = {"sample": sample, "synchronizations": synchronizations, "loop": loop, "profile": profile_calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[], metavar="PART")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: measure small sizes")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("There is no CUDA device. Measure small sizes with --device cpu.")
    set_up()
    device = torch.device(arguments.device, 0 if arguments.device == "cuda" else None)
    print(torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU: small sizes, no CUDA graphs")
    print_versions()
    begin, failed = time.monotonic(), []
    for name in arguments.parts or PARTS:
        try:
            PARTS[name](Plan() if device.type == "cuda" else SMALL, device)
        except Exception:  # the other parts still run
            traceback.print_exc()
            failed.append(name)
    print(f"\n{time.monotonic() - begin:.0f} s")
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
