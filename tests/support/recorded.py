"""A buffer, the environments that fill it, and the oracle that checks what comes out of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from scipy import stats
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer

from support.oracle import Oracle, rows_of
from support.world import Goal, Goals, Transition, World


def chi_square(observed: Counter[Any], expected: Mapping[Any, float]) -> float:
    """Return the p-value of Pearson's test of the counts of cells, given the number of draws of each group.

    A cell is a tuple that begins with its group. Cells that are expected seldom are counted together.
    """
    cells = [cell for cell, mean in expected.items() if mean >= 5]
    pairs = [(observed[cell], expected[cell]) for cell in cells]
    seldom = observed.total() - sum(count for count, _ in pairs), observed.total() - sum(mean for _, mean in pairs)
    pairs += [seldom] if seldom[1] >= 5 else []
    statistic = sum((count - mean) ** 2 / mean for count, mean in pairs)
    degrees = len(pairs) - len({group for group, *_ in cells})
    return float(stats.chi2.sf(statistic, degrees)) if degrees > 0 else 1.0


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

    def check_sequences(self, batch: TensorDictBase, length: int) -> float:
        """Check sequences ``[n * length]``, each with one goal of its last transition; return the relabelled share.

        Transitions of other episodes than that of the last one keep their goals. Rewards are not checked.
        """
        share = []
        for rows in batch.split(length):
            parts = [self.oracle.place[uid][0] for uid in rows["uid"].tolist()]
            is_own = torch.tensor([part is parts[-1] for part in parts])
            relabelled = rows["hindsight", "relabelled"].squeeze(-1)
            expected = is_own & relabelled[-1]
            assert not (relabelled & ~expected).any()
            assert parts[-1].may_be_split or torch.equal(relabelled, expected)
            goals = {tuple(goal) for goal in self.world.goals.pairs(rows["desired_goal"][relabelled]).tolist()}
            assert len(goals) == bool(relabelled[-1])
            assert goals <= self.oracle.goals(int(rows["uid"][-1]))
            share.append(bool(relabelled[-1]))
        return sum(share) / len(share)

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
        return chi_square(drawn, expected)

    def flush(self) -> None:
        """End the running episodes."""
        self.rb.transform[-1].flush()
        self.oracle.flush()


def recorded_in(
    rb: ReplayBuffer, envs: int = 1, strategy: str = "future", *, ids: bool = True, **of_oracle: Any
) -> Recorded:
    """Return a record of an empty buffer with a HERTransform and this strategy."""
    hindsight = rb.transform[-1]
    settings = {"capacity": hindsight.capacity, "her_ratio": hindsight.her_ratio} | of_oracle
    return Recorded(rb, Oracle({strategy: 1.0}, **settings), World(envs, Goals()), ids)
