"""The other transforms of a buffer: which may be listed before and after one that relabels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tensordict import NestedKey, unravel_key
from torchrl.envs import (
    Compose,
    DTypeCastTransform,
    ExcludeTransform,
    MultiStepTransform,
    RenameTransform,
    Reward2GoTransform,
    Transform,
)

from torchrl_her._torchrl import transforms_around
from torchrl_her.compact import CompactGoals
from torchrl_her.keys import HERKeys
from torchrl_her.relabel import RelabelTransform


class Neighbours(NamedTuple):
    """The transforms of a buffer that are listed before and after one that relabels."""

    before: list[Transform]
    after: list[Transform]

    @classmethod
    def of(cls, transform: Transform) -> Neighbours:
        """Return the neighbours of a transform."""
        return cls(*transforms_around(transform))

    def multi_step(self) -> MultiStepTransform | None:
        """Return the transform that makes n-step transitions, if there is one.

        Raises:
            ValueError: if there are two.
        """
        found = [each for each in flatten(self.before) if isinstance(each, MultiStepTransform)]
        if len(found) > 1:
            raise ValueError(
                f"{len(found)} MultiStepTransforms are listed before HERTransform, which would sum sums: keep one."
            )
        return found[0] if found else None

    def compact_goals(self) -> CompactGoals | None:
        """Return the transform that leaves redundant entries out of the storage, if there is one."""
        return next((each for each in flatten(self.before) if isinstance(each, CompactGoals)), None)

    def rewritten(self) -> set[NestedKey]:
        """Return the entries that transforms write, rename or drop after relabelling."""
        keys: set[NestedKey] = set()
        for transform in flatten(self.after):
            # A transform that also reads an entry passes on the goal in it.
            keys.update(set(transform.out_keys or ()) - set(transform.in_keys or ()))
            if isinstance(transform, RenameTransform):
                keys.update(transform.in_keys)
            if isinstance(transform, ExcludeTransform):
                keys.update(map(unravel_key, transform.excluded_keys))
        return keys

    def check(self, replaced: set[NestedKey], keys: HERKeys) -> None:
        """Check that no transform undoes the work of HERTransform, and that HERTransform undoes none of theirs.

        Args:
            replaced: the entries that relabelling replaces.
            keys: the keys of HERTransform.

        Raises:
            ValueError: if the order would give wrong rewards or goals.
        """
        self.check_any(keys)
        for transform in flatten(self.after):
            if isinstance(transform, MultiStepTransform):
                raise ValueError(
                    "MultiStepTransform is listed after HERTransform and would sum rewards of different goals: list "
                    "it before, Compose(MultiStepTransform(...), HERTransform(...))."
                )
        compact = self.compact_goals()
        # Samples do not have these entries before CompactGoals restores them.
        left_out: set[NestedKey] = set() if compact is None else set(compact.left_out)
        for transform in flatten(self.before):
            if isinstance(transform, CompactGoals):
                left_out = set()
            reads, writes = set(transform.in_keys or ()), set(transform.out_keys or ())
            if isinstance(transform, DTypeCastTransform) and reads == writes:
                continue
            if isinstance(transform, ExcludeTransform):
                reads.update(map(unravel_key, transform.excluded_keys))
            # Written transitions reach these transforms after HERTransform has read their goals.
            reads.update(transform.out_keys_inv or ())
            writes.update(transform.in_keys_inv or ())
            if stale := reads & (replaced | left_out):
                raise ValueError(
                    f"{type(transform).__name__} is listed before HERTransform and works on "
                    f"{sorted(map(str, stale))} of the original goal: list it after HERTransform."
                )
            if overwritten := writes & {*replaced, *left_out, keys.next_achieved}:
                raise ValueError(
                    f"{type(transform).__name__} is listed before HERTransform and writes "
                    f"{sorted(map(str, overwritten))}, which relabelling then replaces by raw values: list it after "
                    "HERTransform."
                )

    def check_augmentation(self, keys: HERKeys) -> None:
        """Check that the other transforms work with HindsightAugmentation, which writes more transitions, or none.

        Raises:
            ValueError: if one does not.
        """
        self.check_any(keys)
        for transform in flatten([*self.before, *self.after]):
            if isinstance(transform, MultiStepTransform):
                raise ValueError(
                    "MultiStepTransform sums the rewards of transitions that follow each other, and "
                    "HindsightAugmentation writes copies of single steps, each with a goal of its own. For n-step "
                    "returns under a new goal use HERTransform: Compose(MultiStepTransform(...), HERTransform(...))."
                )
        for transform in flatten(self.before):
            if transform.in_keys_inv:
                raise ValueError(
                    f"{type(transform).__name__} is listed before HindsightAugmentation and changes what is written "
                    f"({sorted(map(str, transform.in_keys_inv))}) after it: list it after HindsightAugmentation."
                )

    def check_any(self, keys: HERKeys) -> None:
        """Check that nothing else relabels or sums rewards, and that CompactGoals is in its place."""
        if any(isinstance(transform, RelabelTransform) for transform in flatten([*self.before, *self.after])):
            raise ValueError(
                "Two transforms would relabel the same transitions: keep one HERTransform, or one "
                "HindsightAugmentation."
            )
        if any(isinstance(transform, Reward2GoTransform) for transform in flatten([*self.before, *self.after])):
            raise ValueError(
                "Reward2GoTransform sums the rewards of episodes when they are written, and relabelling gives their "
                "transitions other goals and rewards: leave it out."
            )
        if any(isinstance(transform, CompactGoals) for transform in flatten(self.after)):
            raise ValueError(
                "CompactGoals is listed after the transform that relabels and would drop the goal under 'next' before "
                "it is read: list it before, Compose(CompactGoals(), HERTransform(...))."
            )
        compact = [transform for transform in flatten(self.before) if isinstance(transform, CompactGoals)]
        if len(compact) > 1:
            raise ValueError("Several CompactGoals would drop the same entries: keep one.")
        for transform in compact:
            transform.check_keys(keys)


def flatten(transforms: Iterable[Transform]) -> Iterator[Transform]:
    """Yield the transforms, replacing each ``Compose`` by the transforms in it."""
    for transform in transforms:
        if isinstance(transform, Compose):
            yield from flatten(transform)
        else:
            yield transform
