"""A buffer, the environments that fill it, and the oracle that checks what comes out of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from scipy import stats
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer

from support.oracle import Oracle, rows_of
from support.world import Goal, Transition, World


@dataclass
class Recorded:
    """A buffer whose writes are recorded, so that all of its transitions can be checked.

    For example, ``recorded.play([["go", "go", "truncated"]] * 2)`` writes an episode of each of two environments.
    """

    rb: ReplayBuffer
    oracle: Oracle
    world: World
    ids: bool = True  # whether transitions have trajectory ids
    stored: dict[int, dict[Any, Any]] = field(default_factory=dict)  # all entries of each transition, as written

    def play(self, moves: Sequence[Iterable[str]], layout: str = "flat") -> None:
        """Let each environment make its moves, and write the transitions.

        Args:
            moves: the moves of each environment; see `support.world.MOVES`.
            layout: "flat", one environment after the other; "time-major", for equally many moves, all environments of
                a step after those of the step before; "add", the same, with ``rb.add``; "lanes", for equally many
                moves, ``[environments, steps]``.
        """
        lanes = [self.world.play(env, each) for env, each in enumerate(moves)]
        if layout in ("time-major", "add"):
            lanes = [list(rows) for rows in zip(*lanes, strict=True)]
        rows = [row for lane in lanes for row in lane]
        data = self.world.tensordict(rows, ids=self.ids)
        if layout == "add":
            for number, row in enumerate(rows):
                self.write([row], data[number])
        else:
            self.write(rows, data.reshape(len(lanes), -1) if layout == "lanes" else data)

    def write(self, rows: Sequence[Transition], data: TensorDictBase) -> None:
        """Write ``data``: transitions ``[rows]`` of the world in this order, before padding, or a single one ``[]``."""
        written = data.reshape(-1)[: len(rows)]
        keys = [key for key in written.keys(True, True) if key != "uid"]
        self.stored |= {row.pop("uid"): row for row in rows_of(written, ["uid", *keys])}
        self.oracle.write(rows)
        if data.ndim:
            self.rb.extend(data)
        else:
            self.rb.add(data)

    def check(self, batch: TensorDictBase | None = None) -> int:
        """Check transitions ``[*batch]``, by default all that are stored; return how many are relabelled."""
        batch = (self.rb[:] if batch is None else batch).reshape(-1)
        is_padding = batch["uid"] < 0
        assert not batch["hindsight", "relabelled"][is_padding].any()
        return self.oracle.check(batch[~is_padding], self.stored, self.world.goals.pairs)

    def p_value(self, batch: TensorDictBase) -> float:
        """Compare the goals of transitions ``[n]`` of ended episodes with their probabilities, by Pearson's test."""
        relabelled, uids = batch["hindsight", "relabelled"].flatten().tolist(), batch["uid"].tolist()
        goals = [tuple(goal) for goal in self.world.goals.pairs(batch["desired_goal"]).tolist()]
        drawn = Counter((uid, goal if new else None) for uid, goal, new in zip(uids, goals, relabelled, strict=True))
        ratio, counts = self.oracle.her_ratio, Counter(uids)
        expected: dict[tuple[int, Goal | None], float] = {
            (uid, None): count * (1 - ratio) for uid, count in counts.items()
        }
        for uid, count in counts.items():
            probabilities = self.oracle.probabilities(uid)
            assert probabilities is not None, "an episode is running, or the goal table may have lost goals"
            expected |= {(uid, goal): count * ratio * p for goal, p in probabilities.items()}
        assert drawn.keys() <= expected.keys(), f"impossible goals were drawn: {drawn.keys() - expected.keys()}"
        cells = [(drawn[cell], mean) for cell, mean in expected.items() if mean >= 5]
        others = len(uids) - sum(count for count, _ in cells), len(uids) - sum(mean for _, mean in cells)
        cells += [others] if others[1] >= 1 else []  # goals that are expected seldom
        if len(cells) <= len(counts):
            return 1.0
        observed, means = zip(*cells, strict=True)
        return float(stats.chisquare(observed, means, ddof=len(counts) - 1, sum_check=False).pvalue)

    def flush(self) -> None:
        """End the running episodes."""
        self.rb.transform[-1].flush()
        self.oracle.flush()
