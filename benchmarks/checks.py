"""Cost of the checks with which HERTransform warns when hindsight does not work.

A transform with its checks and one without them take turns. Both write and sample the same transitions with the same
kind of buffer, on one thread. The transitions come from PointReach with random actions, in episodes of 50 steps.
"""

import argparse
import time
from statistics import median

import torch
from torchrl import torchrl_logger
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv
from tqdm import tqdm

import torchrl_her.envs  # noqa: F401  # registers PointReach
from torchrl_her import HERTransform, SparseReward

EPISODES = 400
TARGETS = {"extend(50)": 0.05, "sample(256)": 0.02}


def make_buffer(*, checks: bool) -> TensorDictReplayBuffer:
    """Return a buffer whose transform runs its checks, or skips them."""
    transform = HERTransform(SparseReward(0.05), capacity=100_000)
    if not checks:
        transform._relabelling.checks = []
    return TensorDictReplayBuffer(storage=LazyTensorStorage(100_000), transform=transform, batch_size=256)


def measure(rounds: int) -> dict[str, dict[bool, list[float]]]:
    """Return the CPU times of each operation with and without checks, in µs."""
    env = GymEnv("torchrl_her/PointReach-v0")
    env.set_seed(0)
    episodes = [env.rollout(50) for _ in tqdm(range(EPISODES), desc="collecting", unit="episode")]
    buffers = {checks: make_buffer(checks=checks) for checks in (False, True)}
    for rb in buffers.values():
        for episode in episodes:
            rb.extend(episode.clone())
    times: dict[str, dict[bool, list[float]]] = {name: {False: [], True: []} for name in TARGETS}
    for number in tqdm(range(rounds), desc="measuring", unit="round"):
        for checks in (False, True) if number % 2 else (True, False):
            episode = episodes[number % EPISODES].clone()
            for name, call in (
                ("extend(50)", lambda rb=buffers[checks], data=episode: rb.extend(data)),
                ("sample(256)", buffers[checks].sample),
                ("sample(256)", buffers[checks].sample),
            ):
                start = time.process_time_ns()
                call()
                times[name][checks].append((time.process_time_ns() - start) / 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3000, help="number of measurements")
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torchrl_logger.setLevel("WARNING")
    print("| µs of CPU time | without checks | with checks | ratio | target |\n|---|---|---|---|---|")
    for name, of_checks in measure(rounds).items():
        without, with_checks = (median(of_checks[checks]) for checks in (False, True))
        # The mean shows the cost of the few samples that are counted.
        means = [sum(sorted(of_checks[checks])[: -len(of_checks[checks]) // 50]) for checks in (False, True)]
        ratio = f"{with_checks / without:.3f} (mean {means[1] / means[0]:.3f})"
        print(f"| {name} | {without:.0f} | {with_checks:.0f} | {ratio} | {1 + TARGETS[name]:.2f} |")


if __name__ == "__main__":
    main()
