"""What a transition costs to write with four relabelled copies, in chunks of several sizes.

`HindsightAugmentation` and cpprb's `HindsightReplayBuffer` are written the same transitions in turn, in shuffled
order and on one thread. Every chunk is whole episodes of 50 steps (see `contenders.py`). cpprb is written in two
ways: an episode at a time, and a step at a time, as in its examples. Next to them, what TorchRL's buffer costs
without hindsight.
"""

import argparse
import random
import time

import numpy as np
import torch
from contenders import AUGMENTATION, CONTENDERS, CPPRB, EPISODE_STEPS, OURS, PLAIN, Cpprb, make_episodes
from torchrl import torchrl_logger
from tqdm import tqdm

ROWS = 100_000  # stored
CHUNKS = 1, 4, 20  # episodes


class CpprbByStep(Cpprb):
    """cpprb's buffer, which each step is added to."""

    def extend(self, data: list[tuple]) -> None:
        """Write step by step, and relabel at the end of each episode."""
        for episode, goal in data:
            for step in range(EPISODE_STEPS):
                self.buffer.add(**{key: value[step] for key, value in episode.items()})
            self.buffer.on_episode_end(goal)


BY_STEP = f"{CPPRB}, step by step"
KINDS = {name: CONTENDERS[name] for name in (PLAIN, OURS, AUGMENTATION, CPPRB)} | {BY_STEP: CpprbByStep}


def measure(rounds: int) -> dict[tuple[str, int], list[float]]:
    """Return the times of writes by contender and episodes in a chunk, in µs per transition."""
    contenders = {name: kind(ROWS) for name, kind in KINDS.items()}
    for each in tqdm(contenders.values(), desc="filling", unit="buffer"):
        each.fill()
    rng = np.random.default_rng(1)
    times: dict[tuple[str, int], list[float]] = {(name, episodes): [] for episodes in CHUNKS for name in contenders}
    for _ in tqdm(range(rounds), desc="measuring", unit="round"):
        for episodes in CHUNKS:
            transitions = make_episodes(episodes, rng)
            for name in random.sample(list(contenders), len(contenders)):
                data = contenders[name].prepare(transitions)
                start = time.perf_counter_ns()
                contenders[name].extend(data)
                times[name, episodes].append((time.perf_counter_ns() - start) / 1e3 / episodes / EPISODE_STEPS)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=300)
    arguments = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torchrl_logger.setLevel("WARNING")
    times = measure(arguments.rounds)
    print("Median time to write a transition in µs, and the median of the ratios to cpprb in the same round")
    print(f"{'transitions in a write':<24}" + "".join(f"{episodes * EPISODE_STEPS:>18,}" for episodes in CHUNKS))
    for name in KINDS:
        cells = (
            f"{np.median(times[name, episodes]):.2f} "
            f"({np.median(np.divide(times[name, episodes], times[CPPRB, episodes])):.2f})"
            for episodes in CHUNKS
        )
        print(f"{name:<24}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
