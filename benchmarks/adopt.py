"""Time and memory to adopt a data set of a million transitions.

A transition has a 25-float observation, 3-float goals and a 4-float action. Each data set is created in one process and
adopted in another, on one thread. Memory is the peak of the adopting process beyond the data set: touched pages
(`RssAnon`, and `VmHWM` for data in memory) and reserved memory (`VmData`). It is read every millisecond, after free
memory was returned to the system. A goal takes 12 bytes, and the target is 40 more bytes per transition. Linux only.
"""

import argparse
import ctypes
import multiprocessing
import re
import tempfile
import threading
import time
from pathlib import Path

import torch
from tensordict import TensorDict

from torchrl_her import HERTransform, ReachedReward, SparseReward

ROWS = 1_000_000
SECONDS, BYTES = 5.0, 12 + 40
LENGTHS = {  # steps of an episode
    "ends by flag": 50,
    "ends by id": 50,
    "1,000 steps": 1000,
    "alternating ids": 50,
    "[20,000, 50]": 50,
    "without goals and rewards": 1000,
    "5 steps": 5,
    "one episode": ROWS,
}
MEASURED = "RssAnon", "VmData"


def make_data(kind: str) -> TensorDict:
    length = LENGTHS[kind]
    row = torch.arange(ROWS)
    episode, step = row // length, row % length
    if kind == "alternating ids":
        episode, step = row % (ROWS // length), row // (ROWS // length)
    achieved = torch.stack([episode, step, step], dim=1).float()
    outcome = achieved + torch.tensor([0.0, 1.0, 1.0])
    desired = (-1 - episode).float().unsqueeze(1).repeat(1, 3)
    end = (step == length - 1).unsqueeze(1)
    none = torch.zeros_like(end)
    data = TensorDict(
        {
            "observation": torch.zeros(ROWS, 25),
            "achieved_goal": achieved,
            "desired_goal": desired,
            "action": torch.zeros(ROWS, 4),
            "next": {
                "observation": torch.zeros(ROWS, 25),
                "achieved_goal": outcome,
                "desired_goal": desired.clone(),
                "reward": torch.full((ROWS, 1), -1.0),
                "done": end,
                "terminated": none,
                "truncated": end.clone(),
            },
        },
        batch_size=ROWS,
    )
    if "id" in kind:
        data["collector", "traj_ids"] = episode
        data["next", "done"], data["next", "truncated"] = none.clone(), none.clone()
    if kind.startswith("without"):
        data = data.exclude("desired_goal", ("next", "desired_goal"), ("next", "reward"))
    return data.reshape(-1, length) if kind.startswith("[") else data


class Peak:
    """Measures the peak memory of this process in a block, beyond the memory at its start, in bytes by name."""

    def __enter__(self) -> "Peak":
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # otherwise free memory would be reused and not be counted
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self.before = self.highest = self.read()
        self.goes_on = True
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.goes_on = False
        self.thread.join()
        self.watch()

    def watch(self) -> None:
        """Read the memory until the block ends."""
        while True:
            now = self.read()
            self.highest = {name: max(value, self.highest[name]) for name, value in now.items()}
            if not self.goes_on:
                break
            time.sleep(0.001)

    @staticmethod
    def read() -> dict[str, int]:
        """Return the current memory of this process, in bytes by name."""
        text = Path("/proc/self/status").read_text()
        return {
            name: 1024 * int(re.search(rf"{name}:\s+(\d+)", text).group(1)) for name in (*MEASURED, "VmHWM", "VmRSS")
        }

    def extra(self) -> dict[str, int]:
        """Return the peak memory beyond the memory at the start."""
        values = {name: self.highest[name] - self.before[name] for name in MEASURED}
        return values | {"VmHWM": self.highest["VmHWM"] - self.before["VmRSS"]}


def save_data(kind: str, folder: str) -> None:
    make_data(kind).memmap(folder)


def measure(kind: str, folder: str, mapped: bool) -> tuple[float, dict[str, int]]:
    """Return the seconds to adopt the data set, and the bytes per transition by name."""
    torch.set_num_threads(1)

    def transform() -> HERTransform:
        reward = ReachedReward() if kind.startswith("without") else SparseReward(0.05)
        return HERTransform(reward, her_ratio=1.0, capacity=ROWS)

    data = TensorDict.load_memmap(folder)
    if not mapped:
        data = data.clone()
    transform().adopt(data.reshape(-1)[:1000].clone())  # warm-up: imports and first calls
    her = transform()
    with Peak() as peak:
        start = time.perf_counter()
        adopted = her.adopt(data)
        seconds = time.perf_counter() - start
    assert adopted.batch_size == data.batch_size
    return seconds, {name: round(value / ROWS) for name, value in peak.extra().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.parse_args()
    print(f"{ROWS:,} transitions; targets: {SECONDS} s, {BYTES} bytes per transition beyond the data set")
    print(f"{'':<28}{'':<14}{'s':>8}{'RssAnon':>10}{'VmHWM':>10}{'VmData':>10}")
    new_process = multiprocessing.get_context("spawn").Pool
    for kind in LENGTHS:
        with tempfile.TemporaryDirectory() as folder:
            with new_process(1) as pool:
                pool.apply(save_data, (kind, folder))
            for mapped in (False, True):
                with new_process(1) as pool:
                    seconds, memory = pool.apply(measure, (kind, folder, mapped))
                # The high-water mark also counts the pages of mapped files.
                columns = memory["RssAnon"], "" if mapped else memory["VmHWM"], memory["VmData"]
                place = "memory-mapped" if mapped else "in memory"
                print(f"{kind:<28}{place:<14}{seconds:>8.2f}" + "".join(f"{column:>10}" for column in columns))


if __name__ == "__main__":
    main()
