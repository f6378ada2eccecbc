"""The replay buffers that the benchmarks compare.

`fill` writes `size` rows. `prepare` converts new transitions to the argument of `extend`, the form in which a training
loop has them. `sample` draws a batch, `sample_many` draws several batches in one call, and `read` returns the entries
of a sampled batch that the checks need.
"""

from contenders.buffers_of_others import Cpprb, StableBaselines3
from contenders.buffers_of_torchrl import (
    Augmentation,
    Floor,
    NoOp,
    Packed,
    PackedAugmentation,
    PackedFile,
    PackedFloor,
    PackedTransform,
    TorchRL,
    TorchRLHindsight,
    Transform,
)

PLAIN, OURS, TORCHRL, SB3 = "no hindsight", "HERTransform", "HERReplayBuffer", "stable-baselines3"
AUGMENTATION, CPPRB = "HindsightAugmentation", "cpprb"
PACKED_AUGMENTATION = "packed, Augmentation"
PACKED, PACKED_OURS = "packed", "packed, HERTransform"
FILE = "packed in a file"
NO_OP, FLOOR, PACKED_FLOOR = "does nothing", "draws nothing", "packed, draws nothing"
WITHOUT_HINDSIGHT = PLAIN, PACKED, FILE, NO_OP, FLOOR, PACKED_FLOOR
FLOORS = NO_OP, FLOOR, PACKED_FLOOR
CONTENDERS = {
    PLAIN: TorchRL,
    OURS: Transform,
    PACKED: Packed,
    PACKED_OURS: PackedTransform,
    AUGMENTATION: Augmentation,
    PACKED_AUGMENTATION: PackedAugmentation,
    TORCHRL: TorchRLHindsight,
    SB3: StableBaselines3,
    CPPRB: Cpprb,
    NO_OP: NoOp,
    FLOOR: Floor,
    PACKED_FLOOR: PackedFloor,
    FILE: PackedFile,
}
