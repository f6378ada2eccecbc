"""The other transforms of a buffer: which may be listed before and after one that relabels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

from tensordict import NestedKey, unravel_key
from torchrl.envs import (
    Compose,
    DTypeCastTransform,
    ExcludeTransform,
    MultiStepTransform,
    Reward2GoTransform,
    Transform,
)

from torchrl_her._torchrl import transforms_around
from torchrl_her.compact import CompactGoals
from torchrl_her.keys import HERKeys
from torchrl_her.relabel import RelabelTransform

Kind = TypeVar("Kind", bound=Transform)


class Neighbours(NamedTuple):
    """The transforms that a buffer lists before and after one that relabels, with those in each ``Compose``."""

    before: list[Transform]
    after: list[Transform]

    @classmethod
    def of(cls, transform: Transform) -> Neighbours:
        """Return the neighbours of a transform."""
        before, after = transforms_around(transform)
        return cls([*_flatten(before)], [*_flatten(after)])

    @property
    def multi_step(self) -> MultiStepTransform | None:
        """The transform that makes n-step transitions, if there is one."""
        return next(iter(_of_kind(MultiStepTransform, self.before)), None)

    @property
    def compact_goals(self) -> CompactGoals | None:
        """The transform that leaves redundant entries out of the storage, if there is one."""
        return next(iter(_of_kind(CompactGoals, self.before)), None)

    def check_hindsight(self, replaced: set[NestedKey], keys: HERKeys) -> None:
        """Check that no transform undoes what HERTransform does to ``replaced`` entries, and that it undoes nothing."""
        self._check_all(keys)
        if len(_of_kind(MultiStepTransform, self.before)) > 1:
            raise ValueError("Several MultiStepTransforms listed before HERTransform would sum sums: keep one.")
        if _of_kind(MultiStepTransform, self.after):
            raise ValueError(
                "MultiStepTransform is listed after HERTransform and would sum rewards of different goals: list it "
                "before, Compose(MultiStepTransform(...), HERTransform(...))."
            )
        # Samples do not have these entries before CompactGoals restores them.
        left_out = set() if self.compact_goals is None else {*self.compact_goals.left_out}
        for transform in self.before:
            if isinstance(transform, CompactGoals):
                left_out = set()
            reads, writes = {*(transform.in_keys or ())}, {*(transform.out_keys or ())}
            if isinstance(transform, DTypeCastTransform) and reads == writes:
                continue
            if isinstance(transform, ExcludeTransform):
                reads.update(map(unravel_key, transform.excluded_keys))
            # Written transitions reach these transforms after HERTransform has read their goals.
            reads.update(transform.out_keys_inv or ())
            writes.update(transform.in_keys_inv or ())
            what = None
            if stale := reads & (replaced | left_out):
                what = f"works on {sorted(map(str, stale))} of the original goal"
            elif overwritten := writes & {*replaced, *left_out, keys.next_achieved}:
                what = f"writes {sorted(map(str, overwritten))}, which relabelling then replaces by raw values"
            if what:
                name = type(transform).__name__
                raise ValueError(f"{name} is listed before HERTransform and {what}: list it after HERTransform.")

    def check_augmentation(self, keys: HERKeys) -> None:
        """Check that the other transforms work with HindsightAugmentation, which writes more transitions, or none."""
        self._check_all(keys)
        if _of_kind(MultiStepTransform, self.before + self.after):
            raise ValueError(
                "MultiStepTransform sums rewards of consecutive transitions, and HindsightAugmentation writes copies "
                "of single steps, each with a goal of its own. For n-step returns under a new goal use HERTransform: "
                "Compose(MultiStepTransform(...), HERTransform(...))."
            )
        for transform in self.before:
            if transform.in_keys_inv:
                raise ValueError(
                    f"{type(transform).__name__} is listed before HindsightAugmentation and changes what is written "
                    f"({sorted(map(str, transform.in_keys_inv))}) after it: list it after HindsightAugmentation."
                )

    def _check_all(self, keys: HERKeys) -> None:
        """Check that nothing else relabels or sums rewards, and that CompactGoals is in its place."""
        if any(isinstance(transform, RelabelTransform) for transform in self.before + self.after):
            raise ValueError(
                "Two transforms would relabel the same transitions: keep one HERTransform, or one "
                "HindsightAugmentation."
            )
        if _of_kind(Reward2GoTransform, self.before + self.after):
            raise ValueError(
                "Reward2GoTransform sums the rewards of episodes when they are written, and relabelling gives their "
                "transitions other goals and rewards: leave it out."
            )
        if _of_kind(CompactGoals, self.after):
            raise ValueError(
                "CompactGoals is listed after the transform that relabels and would drop the goal under 'next' before "
                "it is read: list it before, Compose(CompactGoals(), HERTransform(...))."
            )
        if len(_of_kind(CompactGoals, self.before)) > 1:
            raise ValueError("Several CompactGoals would drop the same entries: keep one.")
        if self.compact_goals is not None:
            self.compact_goals.check_keys(keys)


def _of_kind(kind: type[Kind], transforms: list[Transform]) -> list[Kind]:
    return [transform for transform in transforms if isinstance(transform, kind)]


def _flatten(transforms: Iterable[Transform]) -> Iterator[Transform]:
    """Yield the transforms, replacing each ``Compose`` by the transforms in it."""
    for transform in transforms:
        if isinstance(transform, Compose):
            yield from _flatten(transform)
        else:
            yield transform
