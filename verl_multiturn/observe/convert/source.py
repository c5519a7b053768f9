"""`Source`: a run as the converters read it: its records, what the trainer made of them, and one clock for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from verl_multiturn.observe.joined import Joined
from verl_multiturn.records.reader import Records


@dataclass(frozen=True)
class Verdict:
    """What a conversation earned, and what became of it."""

    score: float | None
    parts: dict[str, float]
    step: int | None
    """Step that trained or validated it; None: it is not known."""
    trained: int | None
    """Its tokens that the loss counted; None: it is not known."""


class Source:
    """A run to be converted.

    Args:
        records: Its records.
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self._joined = Joined(records.joined())
        self.runs = list(records.runs)
        self.steps = [step for step in records.steps() if step.get("event") in ("step", "validation")]
        offsets = {clock["file"]: float(clock["offset_s"]) for clock in records.clocks()}
        self._offsets: dict[str, float] = {}
        self._scores: dict[str, float] = {}
        for line in records.lines():
            if offset := offsets.get(line.get("file", "")):
                self._offsets[line["request_id"]] = offset
            if line.get("event") == "score" and line.get("score") is not None:
                self._scores[line["request_id"]] = float(line["score"])

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the conversations."""
        return iter(self._records.records())

    def offset_s(self, request_id: str) -> float:
        """Return what to add to a conversation's times to get the trainer's."""
        return self._offsets.get(request_id, 0.0)

    def verdict(self, record: dict[str, Any]) -> Verdict:
        """Return what a conversation earned."""
        request_id = record["request_id"]
        at = [
            at for row in range(len(record.get("rows") or [])) if (at := self._joined.find(request_id, row)) is not None
        ]
        if not at:
            return Verdict(self._scores.get(request_id), {}, None, None)
        scores = [score for each in at if (score := self._joined.number("score", each)) is not None]
        trained = sum(int(self._joined.number("trained", each) or 0) for each in at)
        return Verdict(
            sum(scores) if scores else self._scores.get(request_id),
            self._joined.parts(at[-1]),
            self._joined.step(at[-1], int(record.get("step") or 0)),
            trained,
        )

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
