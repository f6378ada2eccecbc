"""Matches the rows of consecutive writes, each of another environment."""

from __future__ import annotations

from torchrl_her.episodes.lanes import Lane
from torchrl_her.episodes.transitions import WrittenTransitions


class RowLanes:
    """The lanes that the rows of the last write left open.

    Without trajectory ids, an environment can start where another one has just arrived. But writes ``[environments,
    steps]`` have the same environments in the same rows. So if most rows start where the same row of the last write
    ended, each of them continues the lane of that row.

    Attributes:
        are_lanes (bool): whether each row of the last writes was another environment.
    """

    def __init__(self) -> None:
        self.are_lanes = False
        self._rows = 0  # in the last write; 0 if they cannot be environments
        self._length = 0  # of a row
        self._lane_of_row: dict[int, Lane] = {}

    def match(self, written: WrittenTransitions) -> dict[int, Lane]:
        """Begin a write; return the lanes that its rows continue, by the position at which a row begins."""
        length, start = written.row_length, written.start
        rows = len(start) // length if length and written.trajectory is None else 0
        is_like_last = rows == self._rows > 0
        earlier = self._lane_of_row if is_like_last else {}
        self._rows, self._length, self._lane_of_row = rows, length, {}
        matching = {
            row * length: lane for row, lane in earlier.items() if lane.key == (None, start[row * length].tobytes())
        }
        were_lanes = self.are_lanes and is_like_last
        # A single environment that does not move matches in at most one of several rows.
        needed = len(earlier) if were_lanes else rows
        self.are_lanes = 2 * len(matching) > needed or (were_lanes and not earlier)
        return matching if self.are_lanes else {}

    def check_runs(self, count: int) -> None:
        """Do not match the next write unless this one has one run of transitions per row."""
        if count != self._rows:
            self._rows = 0

    def leave_open(self, lane: Lane, end: int) -> None:
        """Keep the lane of a run that ends at position ``end`` (exclusive), if a row ends there."""
        if self._rows and end % self._length == 0:
            self._lane_of_row[end // self._length - 1] = lane
