"""The order of transforms: which may come before and after the hindsight transform."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from tensordict import NestedKey, unravel_key
from torchrl.envs import DTypeCastTransform, ExcludeTransform, MultiStepTransform, Reward2GoTransform, Transform

from torchrl_her._private import ids_around, transforms_around
from torchrl_her.keys import HERKeys

Kind = TypeVar("Kind", bound=Transform)


class Neighbours(NamedTuple):
    """The transforms before and after the hindsight transform, including the members of nested ``Compose``."""

    before: list[Transform]
    after: list[Transform]
    ids: list[int]  # of all transforms in the containers
    multi_step: MultiStepTransform | None  # makes n-step transitions
    compact_goals: Any  # the `CompactGoals`, which leaves redundant entries out of the storage, or None
    movement_priority: Any  # the `MovementPriority`, or None
    checking: list[Any]  # of these two, those that are present: they may refuse a write that they will see later
    counting: list[Any]  # the `NormalizedInputs`, which count written transitions

    @classmethod
    def of(cls, transform: Transform) -> Neighbours:
        """Return the neighbours of a transform."""
        before, after = transforms_around(transform)
        compact, movement = _marked("leaves_out_entries", before), _marked("sets_movement", before)
        return cls(
            before,
            after,
            ids_around(transform),
            multi_step=_first(_of_kind(MultiStepTransform, before)),
            compact_goals=_first(compact),
            movement_priority=_first(movement),
            checking=compact[:1] + movement[:1],
            counting=_marked("counts_writes", after),
        )

    def check_hindsight(self, replaced: set[NestedKey], keys: HERKeys) -> None:
        """Check that ``HERTransform`` and the other transforms do not undo each other's work.

        ``replaced`` are the keys of the entries that relabelling replaces.
        """
        self._check_all()
        if len(_of_kind(MultiStepTransform, self.before)) > 1:
            raise ValueError(
                "Several MultiStepTransforms come before HERTransform, and the second would sum the sums of the first: "
                "keep one."
            )
        if _of_kind(MultiStepTransform, self.after):
            raise ValueError(
                "MultiStepTransform comes after HERTransform and would sum rewards of different goals. Place it before "
                "HERTransform: Compose(MultiStepTransform(...), HERTransform(...))."
            )
        # Samples lack these entries until CompactGoals restores them.
        left_out = set() if self.compact_goals is None else {*self.compact_goals.left_out}
        for transform in self.before:
            if transform is self.compact_goals:
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
                what = f"reads {sorted(map(str, stale))} before relabelling replaces or restores them"
            elif overwritten := writes & {*replaced, *left_out, keys.next_achieved_goal}:
                what = (
                    f"writes {sorted(map(str, overwritten))}, which relabelling then replaces with unprocessed values"
                )
            if what:
                name = type(transform).__name__
                raise ValueError(f"{name} comes before HERTransform and {what}. Place it after HERTransform.")

    def check_augmentation(self) -> None:
        """Check that the other transforms work with ``HindsightAugmentation``, which stores copies of transitions."""
        self._check_all()
        if _of_kind(MultiStepTransform, self.before + self.after):
            raise ValueError(
                "MultiStepTransform sums rewards of consecutive transitions, but HindsightAugmentation writes copies "
                "of single steps with different goals. For n-step returns under a new goal, use HERTransform: "
                "Compose(MultiStepTransform(...), HERTransform(...))."
            )
        if self.movement_priority is not None:
            self.movement_priority.check_order()
        for transform in self.before:
            if transform.in_keys_inv:
                raise ValueError(
                    f"{type(transform).__name__} comes before HindsightAugmentation and changes entries "
                    f"({sorted(map(str, transform.in_keys_inv))}) of transitions that were already relabelled. Place "
                    "it after HindsightAugmentation."
                )

    def _check_all(self) -> None:
        """Check that no other transform relabels or sums rewards, and that ``CompactGoals`` comes first."""
        if _marked("relabels", self.before + self.after):
            raise ValueError(
                "Two transforms of the buffer would relabel the same transitions: keep one HERTransform, or one "
                "HindsightAugmentation."
            )
        if _of_kind(Reward2GoTransform, self.before + self.after):
            raise ValueError(
                "Reward2GoTransform sums the rewards of the original goals when transitions are written, but "
                "relabelling replaces goals and rewards. Remove Reward2GoTransform."
            )
        if _marked("leaves_out_entries", self.after):
            raise ValueError(
                "CompactGoals comes after the hindsight transform and would drop the goal under 'next' before it "
                "is read. Place CompactGoals first: Compose(CompactGoals(), HERTransform(...))."
            )
        if len(_marked("leaves_out_entries", self.before)) > 1:
            raise ValueError("Several CompactGoals transforms would drop the same entries: keep one.")


def _of_kind(kind: type[Kind], transforms: list[Transform]) -> list[Kind]:
    return [transform for transform in transforms if isinstance(transform, kind)]


def _marked(attribute: str, transforms: list[Transform]) -> list[Transform]:
    """Return the transforms of this package whose class sets an attribute to True. This module imports none of them."""
    return [transform for transform in transforms if getattr(transform, attribute, False)]


def _first(transforms: list[Any]) -> Any:
    return transforms[0] if transforms else None
