"""The checks of `benchmarks.proxy_fuzz`: rows and receipts against the engine's log and the clients' answers.

No check asks the forest which completions it matched, delivered or trained. The session names three things: which
generation has which id, its messages, and which messages were rendered before it.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.long.endpoint.proxy_fuzz_agents import Done, Fuzzed, Known
from tests.long.endpoint.proxy_fuzz_ids import misplaced
from tests.long.endpoint.proxy_fuzz_model import MARK, Log, Sampled
from tests.long.endpoint.proxy_fuzz_session import MOST_FILES, written
from tests.long.endpoint.proxy_fuzz_wire import Message, Received
from verl_multiturn.certificate.check import CertificateRow, verify
from verl_multiturn.certificate.conversations import unjoined
from verl_multiturn.certificate.receipts import Receipt, Receipts
from verl_multiturn.proxy.http.parsing import parse_body
from verl_multiturn.proxy.protocols import PROTOCOLS
from verl_multiturn.proxy.protocols.requests import ChatRequest, RefusedError
from verl_multiturn.proxy.sessions.proxy_run import ProxyRun
from verl_multiturn.proxy.sessions.rendering import closing_ids
from verl_multiturn.rollout.outcome import Outcome
from verl_multiturn.rows.keys import RowKey

KINDS = ("violations", "trained_twice", "undelivered_trained", "control_tokens", "unaccounted")


@dataclass
class Findings:
    """Errors found, by kind."""

    count: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    files: list[str] = field(default_factory=list)
    """Sessions with findings that were written whole."""

    def add(self, kind: str, what: str) -> None:
        """Count a finding, and keep it as an example if there are few."""
        self.count[kind] += 1
        if len(self.examples[kind]) < 5:
            self.examples[kind].append(what)


@dataclass
class Checked:
    """A session that is over, and all that is known of it.

    Args:
        played: The session and its clients.
        log: The engine's log.
        outcome: Its outcome.
        receipts: Receipts of its generations.
        run: Parts that it ran with.
        findings: Target of the errors found.
    """

    played: Fuzzed
    log: Log
    outcome: Outcome
    receipts: Sequence[Receipt]
    run: ProxyRun
    findings: Findings
    _numbers: dict[int, int | None] = field(default_factory=dict)
    """Numbers of the generations that clients got, by the identity of their answers."""
    _found: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._of = {made.number: made for made in self.log.sampled}
        completions = self.played.session.forest.completions.values()
        self._nodes = {node.generation.versions[0] // 2: node for node in completions}
        self._shown = {number: json.dumps(node.said, ensure_ascii=False) for number, node in self._nodes.items()}
        self._text = {made.number: self._decode(made.ids) for made in self.log.sampled}
        for done in self.played.done:
            for got in done.received:
                self._numbers[id(got)] = self._number(got)

    async def run_all(self, seed: int) -> None:
        """Run all checks, and write the session to a file if one of the first has found something."""
        before = self.findings.count.total()
        await self._run_all()
        if self.findings.count.total() > before and len(self.findings.files) < MOST_FILES:
            again = f"python -m benchmarks.proxy_fuzz --seed {seed} --only {self.played.session.id}"
            path = written(again, self.played, self.log, self._nodes, self._numbers, self.run, self._found)
            self.findings.files.append(f"{path} ({again})")

    async def _run_all(self) -> None:
        for wrong in (*self.log.wrong, *self.played.wrong):
            self._add("violations", wrong)
        if self.log.most_at_once > self.run.max_inflight:
            self._add("violations", f"{self.log.most_at_once} generations at once, at most {self.run.max_inflight}")
        most = self.run.max_completions
        if most is not None and self.log.asked > most + self.log.failed:
            self._add("violations", f"{self.log.asked} generations, {self.log.failed} failed, of {most} allowed")
        trained = self._trained()
        self._certified()
        self._accounted(trained)
        self._received(trained)
        for done in self.played.done:
            self._answered(done)
        self._repeated()
        await self._controlled()

    def _add(self, kind: str, what: str) -> None:
        self._found.append(f"{kind}: {what}")
        self.findings.add(kind, f"{self.played.session.id}: {what}")

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.played.family.template.tokenizer.decode(list(ids)))

    def _number(self, got: Received) -> int | None:
        """Return the number of the generation that a client got; None if unknown."""
        found = set(map(int, MARK.findall(got.text)))
        named = self.played.session.forest.completions.get(got.id)
        if named is not None:
            number = named.generation.versions[0] // 2
            if found - {number}:
                self._add("violations", f"the answer {got.id} shows the texts of {sorted(found)}, it is {number}")
            return number
        return found.pop() if len(found) == 1 else None

    def _trained(self) -> dict[int, dict[int, int]]:
        """Return the trained tokens of each generation, by its number and row."""
        trained: dict[int, dict[int, int]] = defaultdict(dict)
        for index, row in enumerate(self.outcome.rows):
            mask, versions = np.array(row.trajectory.mask), np.array(row.trajectory.versions)
            for number, tokens in Counter((versions[mask == 1] // 2).tolist()).items():
                trained[number][index] = tokens
        for number, rows in trained.items():
            made = self._of.get(number)
            if made is None:
                self._add("violations", f"rows {rows} train tokens of no generation")
            elif len(rows) > 1 or sum(rows.values()) > len(made.ids):
                self._add("trained_twice", f"generation {number} of {len(made.ids)} tokens is trained in {rows}")
            elif sum(rows.values()) < len(made.ids):
                self._add("violations", f"generation {number} of {len(made.ids)} tokens is trained in part: {rows}")
        return trained

    def _certified(self) -> None:
        try:
            name, places = self.played.session.id, self.outcome.places
            receipts = Receipts.of_rows(name, self.receipts, places, "u", 0, False, not self.outcome.valid)
            receipts = [Receipts.from_bytes(own.to_bytes()) for own in receipts]
        except ValueError as error:
            self._add("unaccounted", str(error))
            return
        found = [str(each) for each in unjoined({RowKey("u", "0", str(own.row)): own for own in receipts})]
        if len(receipts) != len(self.outcome.rows):
            found.append(f"{len(self.outcome.rows)} rows, receipts of {len(receipts)}")
        for row, own in zip(self.outcome.rows, receipts, strict=False):
            written = row.trajectory
            ids, first = np.array(written.ids), written.prompt_length
            limits = self.run.limits
            if first > limits.prompt_length or len(ids) - first > limits.response_length:
                found.append(f"row {own.row} has {first} + {len(ids) - first} tokens")
            columns = [np.array(each) for each in (written.mask, written.logprobs, written.versions)]
            checked = CertificateRow(
                ids[:first], ids[first:], *columns, whole=True,
                turn_ids=np.array(written.turn_ids), sources=np.array(written.sources),
            )  # fmt: skip
            found += [str(each) for each in verify(checked, own)]
        for each in found:
            self._add("violations", each)

    def _accounted(self, trained: Mapping[int, Mapping[int, int]]) -> None:
        """Check that each generation has a receipt, and is at its stated place."""
        places = self.outcome.places
        listed = [int(receipt.versions[0]) // 2 for receipt in self.receipts]
        if sorted(listed) != sorted(self._of):
            lost = sorted(set(self._of) - set(listed))
            self._add("unaccounted", f"of {len(self._of)} generations {len(listed)} have receipts; {lost} have none")
        if len(places) != len(listed):
            self._add("unaccounted", f"{len(listed)} generations, {len(places)} places")
        for number, place in zip(listed, places, strict=False):
            rows = list(trained.get(number, ()))
            if rows != ([place] if isinstance(place, int) else []):
                self._add("unaccounted", f"generation {number} is said to be in {place!r}, it is trained in {rows}")
            if (place == "invalid") != (not self._of[number].sound) and place != "undelivered":
                self._add("unaccounted", f"generation {number} is in {place!r}, sound: {self._of[number].sound}")
            if place == "dropped_row" and len(self.outcome.rows) != self.run.max_rows:
                self._add("unaccounted", f"a row was left out where {len(self.outcome.rows)} stayed")
            if (place == "not_selected" and self.run.select is None) or place == "too_old":
                self._add("unaccounted", f"generation {number} is in {place!r}")

    def _received(self, trained: Mapping[int, Mapping[int, int]]) -> None:
        """Check that a client received each trained completion, and that one it waited for has a row or a reason."""
        places = {
            int(receipt.versions[0]) // 2: place
            for receipt, place in zip(self.receipts, self.outcome.places, strict=False)
        }
        got: set[int | None] = set()
        waited: Counter[int] = Counter()
        for done in self.played.done:
            for each in done.received:
                number = self._numbers[id(each)]
                got.add(number)
                if done.stayed and number is not None:
                    waited[number] += 1
        for number in trained:
            # An answer without a mark may be anybody's: a client that writes it itself seems to send it back, and only
            # the first of several choices has an id.
            if number not in got and f"m{number:06d}y" in self._shown.get(number, ""):
                self._add("undelivered_trained", f"generation {number} is trained, no client got all of it")
        for number, clients in waited.items():
            if clients > 1:
                self._add("violations", f"{clients} clients that waited got generation {number}")
            if places.get(number) == "undelivered" or number not in places:
                self._add("unaccounted", f"a client waited for {number} and got it, it is {places.get(number)!r}")

    def _answered(self, done: Done) -> None:
        """Check an answer against the engine's log: shown texts, continued completion, usage."""
        for got in done.received:
            number = self._numbers[id(got)]
            made = self._of.get(number) if number is not None else None
            if made is None:
                continue
            if got.usage is not None and (
                got.usage[0] != len(made.given) or (done.ask.n == 1 and got.usage[1] != len(made.ids))
            ):
                self._add("violations", f"usage {got.usage} of {number}, {len(made.given)} and {len(made.ids)} tokens")
            read = self._decode(made.given)
            at = -1
            for mark in done.plan.shown:
                at = read.find(mark, at + 1)
                if at < 0:
                    self._add("violations", f"the model was not shown {mark} for {number}, or in another order")
                    break
            node = self._nodes.get(made.number)
            if node is not None and (wrong := misplaced(done, node.prompt.conversation, self.played.session.sent)):
                self._add("violations", f"{number}: {wrong}")
            plan = done.plan
            known = plan.continues
            if known is not None and self._appends(done, known) and not self._begins(made, known, plan.appended):
                self._add("violations", f"{number} does not continue {known.received}: {done.ask.messages}")
            elif known and done.ask.ids and self._appends(done, known) and node and not (node.parent or plan.appended):
                # Rendered whole it may have the same tokens. With a stop text appended it need not continue.
                self._add("violations", f"{number} begins a root, its client renamed {done.ask.ids}")
            if plan.rewrites is not None and plan.crosses:  # rendered whole it may have the same tokens
                if node and node.parent and node.parent.completion.id == plan.rewrites.received.id:
                    self._add("violations", f"{number} continues with crossed ids: {done.ask.messages}")
            elif plan.rewrites is not None and self._begins(made, plan.rewrites, None, unknown=False):
                self._add("violations", f"{number} continues what was rewritten: {done.ask.messages}")

    def _appends(self, done: Done, known: Known) -> bool:
        """Return whether the family can append a request's messages after a completion."""
        added = done.ask.messages[len(known.ask.messages) + 1 :]
        return self.played.family.user_turns or all(message["role"] == "tool" for message in added)

    def _begins(self, made: Sampled, known: Known, appended: str | None, unknown: bool = True) -> bool:
        """Return whether a generation continues a completion, or one that looks the same; `unknown`, if not known."""
        alike = [
            self._numbers[id(got)]
            for done in self.played.done
            for got in done.received
            if Known(done.ask, got, None, []).key == known.key
        ]
        some = [self._of[number] for number in alike if number in self._of]
        if len(some) < len(alike):  # one of them has no name
            return unknown
        template = self.played.family.template
        if not unknown and not closing_ids(template.codec):
            # A turn that was cut looks like the beginning of others where the template does not end turns.
            some = [one for one in some if one.ids[-1] in template.end_ids]
        own = self._numbers[id(known.received)]
        if appended is not None and own is not None and appended not in self._text[own]:
            return True  # it was not stopped there, so nothing need continue it
        return any(self._continues(made.given, one) for one in some)

    def _continues(self, given: Sequence[int], one: Sampled) -> bool:
        """Return whether ids continue a generation. A cut turn is ended first, or a prompt may look like it."""
        template, length = self.played.family.template, len(one.after)
        closing = [] if one.ids[-1] in template.end_ids else closing_ids(template.codec)
        return list(given[: length + len(closing)]) == one.after + closing

    def _repeated(self) -> None:
        """Check that a client that came back got the answer that it had left behind, where nothing failed."""
        if self.log.failed or self.log.cancelled:
            return
        groups: dict[int, list[Done]] = defaultdict(list)
        for done in self.played.done:
            groups[id(done.ask)].append(done)
        for group in groups.values():
            last = group[-1]
            number = self._numbers[id(last.received[0])] if last.received else None
            if len(group) < 2 or number is None:
                continue
            given = self._of[number].given
            sampled = sum(made.given == given for made in self.log.sampled)
            if sampled > (got := sum(len(done.received) for done in group)):
                self._add("violations", f"{sampled} generations for {len(group)} same requests that got {got}")

    async def _controlled(self) -> None:
        """Compare the control tokens of the model's prompt with those of the same request without its texts."""
        family = self.played.family
        for done in self.played.done:
            number = self._numbers[id(done.received[0])] if done.received else None
            if number is None:
                continue
            body = parse_body(done.ask.body())
            request = PROTOCOLS[done.ask.path].read(body, self.played.session.sent)
            made = self._of[number]
            for kept, tokens in ((("system", "developer", "assistant"), family.outside), ((), family.authored)):
                try:
                    wrong = [each async for each in self._forged(made, request, kept, tokens)]
                except RefusedError:
                    continue  # the same without texts has no form
                if all(wrong):
                    what = f"{number} ({sorted(kept)} kept): {' or '.join(wrong)}: {done.ask.messages}"
                    self._add("control_tokens", what)

    async def _forged(
        self, made: Sampled, request: ChatRequest, kept: Sequence[str], tokens: Mapping[int, str]
    ) -> AsyncIterator[str]:
        """Return how the control tokens of a prompt differ from those of the same request without texts.

        A prompt that begins with an earlier turn is that turn's continuation; or it was rendered whole, and looks so.
        """
        renderer = self.run.renderer
        tools = [_plain_schema(tool) for tool in request.tools]
        starts = (one for one in self.log.sampled if one is not made and made.given[: len(one.after)] == one.after)
        parent = max(starts, key=lambda one: len(one.after), default=None)
        messages = [plain(message, message["role"] in kept) for message in request.messages]
        said = [index for index, message in enumerate(messages) if message["role"] == "assistant"]

        def difference(given: Sequence[int], harmless: Sequence[int]) -> str:
            found, expected = ([tokens[each] for each in ids if each in tokens] for ids in (given, harmless))
            return "" if found == expected else f"{found} instead of {expected}"

        if parent is not None and said:
            following = await renderer.following(messages[said[-1]], messages[said[-1] + 1 :], parent.ids, tools)
            wrong = difference(made.given[len(parent.after) :], [*following.template, *following.added])
            yield wrong
            if not wrong:
                return
        yield difference(made.given, (await renderer.prompt(messages, tools, json.dumps(tools))).ids)


def plain(message: Message, kept: bool) -> Message:
    """Return a message with harmless texts in the place of its own, blank ones aside."""
    if kept:
        return message
    made = {**message, "content": _plain_text(message.get("content") or "")}
    if made.get("reasoning_content"):
        made["reasoning_content"] = _plain_text(made["reasoning_content"])
    if made.get("tool_calls"):
        made["tool_calls"] = [_plain_call(call) for call in made["tool_calls"]]
    return made


def _plain_text(text: str) -> str:
    return "x" if text.strip() else text


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    given = call["function"]["arguments"]
    try:
        loaded = json.loads(given or "{}")
    except ValueError:
        loaded = None
    arguments = json.dumps(_plain_value(loaded)) if isinstance(loaded, dict) else _plain_text(given)
    return {**call, "function": {"name": "f", "arguments": arguments}}


def _plain_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {f"k{index}": _plain_value(each) for index, each in enumerate(value.values())}
    if isinstance(value, list):
        return [_plain_value(each) for each in value]
    return _plain_text(value) if isinstance(value, str) else value


def _plain_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    function = json.loads(json.dumps(schema["function"]))
    for holder in (function, *function["parameters"]["properties"].values()):
        holder["description"] = _plain_text(holder["description"])
    return {**schema, "function": function}
