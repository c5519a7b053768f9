"""`RunSource`: a run as the converters read it: its records, the trainer's results for them, and one clock for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from verl_multiturn.records.read.records import Records
from verl_multiturn.records.read.scores import Reward, is_right, ranges_of, rewards_of


class RunSource:
    """A run to be converted.

    Args:
        records: Its records.
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self._rewards = rewards_of(records)
        self._ranges = ranges_of(self._rewards.values())
        self.runs = list(records.runs)
        self.steps = [step for step in records.steps() if step.get("event") in ("step", "validation")]
        offsets = {clock["file"]: float(clock["offset_s"]) for clock in records.clocks()}
        self._offsets: dict[str, float] = {}
        for line in records.lines():
            if offset := offsets.get(line.get("file", "")):
                self._offsets[line["request_id"]] = offset

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the conversations."""
        return iter(self._records.records())

    def offset_s(self, request_id: str) -> float:
        """Return the seconds to add to a conversation's times to get the trainer's."""
        return self._offsets.get(request_id, 0.0)

    def reward(self, record: dict[str, Any]) -> Reward:
        """Return a conversation's reward."""
        found = self._rewards.get(record["request_id"], Reward())
        return found if record.get("valid", True) else found._replace(score=None)

    def is_right(self, reward: Reward) -> bool | None:
        """Return whether a conversation solved its task; None: it has no reward."""
        return None if reward.score is None else is_right(reward, self._ranges)

    @property
    def model(self) -> str:
        """Return the model's path; "" where it was not recorded."""
        settings: Any = self.runs[-1].get("settings") if self.runs else None
        for name in ("actor_rollout_ref", "model", "path"):
            settings = settings.get(name) if isinstance(settings, dict) else None
        return str(settings or "")

    @property
    def version(self) -> str:
        """Return the version of this package that the run had."""
        return str((self.runs[-1].get("versions") or {}).get("verl_multiturn") or "unknown") if self.runs else "unknown"

    @property
    def start(self) -> str:
        """Return the name of the run's last start."""
        return str(self.runs[-1].get("start") or "") if self.runs else ""

    def schemas(self, names: Sequence[str]) -> list[Any]:
        """Return the schemas of tools."""
        known = self.runs[-1].get("schemas") or [] if self.runs else []
        return [
            schema
            for schema in known
            if isinstance(schema, dict) and (schema.get("function") or {}).get("name") in set(names)
        ]
