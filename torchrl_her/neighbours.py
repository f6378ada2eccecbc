"""Which transforms stand before one that relabels and after it, and whether they may."""

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


class Neighbours(NamedTuple):
    """The transforms of a buffer, as their containers list them."""

    before: list[Transform]
    after: list[Transform]

    @classmethod
    def around(cls, transform: Transform) -> Neighbours:
        """Look them up."""
        before: list[Transform] = []
        after: list[Transform] = []
        # Transform.container would do, but raises where no environment contains it.
        while (reference := transform.__dict__["_container"]) is not None and (container := reference()) is not None:
            listed = list(container)
            before[:0] = listed[: listed.index(transform)]
            after += listed[listed.index(transform) + 1 :]
            transform = container
        return cls(before, after)

    def multi_step(self) -> MultiStepTransform | None:
        """Return the transform that makes windows of several steps, if there is one.

        Raises:
            ValueError: if there are two.
        """
        found = [each for each in flatten(self.before) if isinstance(each, MultiStepTransform)]
        if len(found) > 1:
            raise ValueError(
                f"{len(found)} MultiStepTransforms are listed before HERTransform, which would sum sums: keep one."
            )
        return found[0] if found else None

    def written_after(self) -> set[NestedKey]:
        """Return the entries that later transforms write anew, rename or take away."""
        keys: set[NestedKey] = set()
        for transform in flatten(self.after):
            # One that reads an entry, too, passes on the goal in it.
            keys.update(set(transform.out_keys or ()) - set(transform.in_keys or ()))
            if isinstance(transform, RenameTransform):
                keys.update(transform.in_keys)
            if isinstance(transform, ExcludeTransform):
                keys.update(map(unravel_key, transform.excluded_keys))
        return keys

    def check(self, replaced: set[NestedKey], outcome: NestedKey, hindsight: type[Transform]) -> None:
        """Check that no transform undoes the work of another.

        Args:
            replaced: the entries that relabelling takes from what was written.
            outcome: the achieved goal under ``"next"``, which it compares goals with.
            hindsight: the class of the transforms that relabel, of which there may be one.

        Raises:
            ValueError: if the order would give wrong rewards or goals.
        """
        self.check_alone(hindsight)
        for transform in flatten(self.after):
            if isinstance(transform, MultiStepTransform):
                raise ValueError(
                    "MultiStepTransform is listed after HERTransform and would sum rewards of different goals: list "
                    "it before, Compose(MultiStepTransform(...), HERTransform(...))."
                )
        for transform in flatten(self.before):
            reads, writes = set(transform.in_keys or ()), set(transform.out_keys or ())
            if isinstance(transform, DTypeCastTransform) and reads == writes:
                continue
            if isinstance(transform, ExcludeTransform):
                reads.update(map(unravel_key, transform.excluded_keys))
            # What changes transitions on their way in does so after their goals were kept.
            reads.update(transform.out_keys_inv or ())
            writes.update(transform.in_keys_inv or ())
            if stale := reads & replaced:
                raise ValueError(
                    f"{type(transform).__name__} is listed before HERTransform and works on "
                    f"{sorted(map(str, stale))} of the original goal: list it after HERTransform."
                )
            if overwritten := writes & {*replaced, outcome}:
                raise ValueError(
                    f"{type(transform).__name__} is listed before HERTransform and writes "
                    f"{sorted(map(str, overwritten))}, which relabelling then replaces by raw values: list it after "
                    "HERTransform."
                )

    def check_alone(self, hindsight: type[Transform]) -> None:
        """Check that no other transform relabels, and that none sums rewards over steps before relabelling does."""
        if any(isinstance(transform, hindsight) for transform in flatten([*self.before, *self.after])):
            raise ValueError(
                "Two transforms would relabel the same transitions: keep one HERTransform, or one "
                "HindsightAugmentation."
            )
        if any(isinstance(transform, Reward2GoTransform) for transform in flatten([*self.before, *self.after])):
            raise ValueError(
                "Reward2GoTransform sums the rewards of episodes when they are written, and relabelling gives their "
                "transitions other goals and rewards, each its own: leave it out."
            )

    def check_augmentation(self, hindsight: type[Transform]) -> None:
        """Check that the others can do with what relabelling at writing makes: more transitions, or none.

        Raises:
            ValueError: if one cannot.
        """
        self.check_alone(hindsight)
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


def flatten(transforms: Iterable[Transform]) -> Iterator[Transform]:
    """Yield the transforms, with those inside of a ``Compose`` in its place."""
    for transform in transforms:
        if isinstance(transform, Compose):
            yield from flatten(transform)
        else:
            yield transform
