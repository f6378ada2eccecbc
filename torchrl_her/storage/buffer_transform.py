"""The base class of transforms for replay buffers."""

from __future__ import annotations

from torchrl.envs import EnvBase, Transform


class BufferTransform(Transform):
    """A transform of replay buffers. Using it in an environment is an error."""

    def set_container(self, container: Transform | EnvBase) -> None:
        """Set the container. An environment raises a ValueError."""
        super().set_container(container)
        if self.parent is not None:
            self.reset_parent()
            name = type(self).__name__
            raise ValueError(
                f"{name} is a transform of replay buffers and cannot be a transform of an environment: pass it to the "
                f"buffer, ReplayBuffer(transform={name}(...))."
            )
