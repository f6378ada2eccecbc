"""Matches the rows of consecutive writes ``[environments, steps]``."""

from __future__ import annotations

from torchrl_her.episodes.lanes import Lane
from torchrl_her.episodes.transitions import WrittenTransitions


class RowLanes:
    """The open lane of each row of the last write.

    Without trajectory ids, only goals identify a lane, and they can be ambiguous: one environment can start where
    another one has just arrived. But consecutive writes ``[environments, steps]`` have the same environments in the
    same rows. So if most rows start where the same row of the last write ended, each of these rows continues the lane
    of that row.

    Attributes:
        are_lanes (bool): whether the rows of consecutive writes were recognized as the same environments.
    """

    def __init__(self) -> None:
        self.are_lanes = False
        self._rows = 0  # the number of rows of the last write; 0 if they cannot be environments
        self._length = 0  # the number of steps of a row
        self._lane_of_row: dict[int, Lane] = {}

    def match(self, written: WrittenTransitions) -> dict[int, Lane]:
        """Begin a write; return the lane that each row continues, by the position of the row's first transition."""
        length, start = written.row_length, written.start
        rows = len(start) // length if length and written.trajectory is None else 0
        is_like_last = rows == self._rows > 0
        earlier = self._lane_of_row if is_like_last else {}
        self._rows, self._length, self._lane_of_row = rows, length, {}
        matching = {
            row * length: lane for row, lane in earlier.items() if lane.key == (None, start[row * length].tobytes())
        }
        were_lanes = self.are_lanes and is_like_last
        # In a one-dimensional write, each row is one step. A single environment leaves one lane open, so at most one
        # row matches.
        needed = len(earlier) if were_lanes else rows
        self.are_lanes = 2 * len(matching) > needed or (were_lanes and not earlier)
        return matching if self.are_lanes else {}

    def check_runs(self, count: int) -> None:
        """Match the next write only if this write has exactly one run of transitions per row."""
        if count != self._rows:
            self._rows = 0

    def leave_open(self, lane: Lane, end: int) -> None:
        """Keep the open lane of a run if its ``end`` (exclusive) is the end of a row."""
        if self._rows and end % self._length == 0:
            self._lane_of_row[end // self._length - 1] = lane
