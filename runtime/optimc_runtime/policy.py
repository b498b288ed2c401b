"""Which of those that wait is admitted first."""

from __future__ import annotations

from typing import Literal

PolicyName = Literal["fcfs", "shortest-prompt", "priority"]
"""By arrival; by length of the prompt; by the requests' priority, lower first. Waiting counts for every request."""
