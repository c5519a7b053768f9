"""`TeacherRows`: a teacher's log-probs of every row of a finished conversation (verl's `distillation.enabled`).

verl's agent-loop worker asks its teacher about the last row alone. Ours asks for each row, by verl's own method, and so
with verl's client, routing and form of the columns:

    worker ── rows ──▶ `TeacherRows.ask` ─┬─ row 0 ─▶ verl's `_compute_teacher_logprobs` ─▶ a teacher's server
                                          └─ row 1 ─▶ …
    extra_fields of each row ◀── `teacher_ids`, `teacher_logprobs`, (S, K) each ── checked

S is the row's number of tokens. Entry i is about token i + 1, the last one about none. K is 1, and the id that of the
row's own token, or `distillation_loss.topk`, and the ids are the teacher's likeliest.

Invariants:
- the rows of a validation are scored by no teacher;
- a row is scored by itself, also where it shares a prefix with another one: verl asks for the log-probs of all of its
  tokens, so that a teacher's cache is not read;
- no row of a training is stored without the columns, and nothing takes their place: an answer that cannot be used ends
  the run, and an outage of the teacher makes the conversation wait, and then fail;
- all tokens have finite log-probs, those that are not trained, too: verl multiplies by the mask, and infinity times 0
  is NaN.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from ray.exceptions import RayActorError

from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.calls.outages.authorship import NOTHING
from verl_multiturn.calls.outages.causes import cause_of
from verl_multiturn.calls.outages.guarded_call import GuardedCall, ask_through
from verl_multiturn.calls.outages.process import OutageEndError, Outages
from verl_multiturn.calls.timeline import during
from verl_multiturn.certificate.check import LOGPROB
from verl_multiturn.certificate.receipts import teacher_digest, with_teacher
from verl_multiturn.describe import describe
from verl_multiturn.errors import OutageError, TeacherContractError
from verl_multiturn.verl_bridge.model.loading import vocabulary_size
from verl_multiturn.verl_bridge.names import ROLLOUT, SGLANG

logger = logging.getLogger(__name__)

NAME = "teacher"
"""Name of the teachers' outages."""
IDS, LOGPROBS = "teacher_ids", "teacher_logprobs"
"""verl's names of the columns."""
_LEASE_S = 600.0
"""Seconds after which a question that was let through in an outage counts as failed."""
_TRIES = 3
"""How often a question is repeated where a server has died, and no outage is known: another one may take it."""
_VERLS_CHECKS = (AssertionError, LookupError, TypeError, ValueError)
"""Errors of verl's client and servers for an answer that is short or empty, as of a request that a server aborted."""
_OF_VLLM = "detokenize"
"""A parameter of vLLM's that verl sends to every teacher."""
_NONE_LEFT = "No available servers"
"""The error of verl's load balancers without a server."""
_MOST_MASS = 1.02
"""Largest sum of the probabilities of one position."""

Ask = Callable[[Any], Awaitable[None]]
"""Asks verl's teacher about one row, an output of an agent loop, and writes the answer into its `extra_fields`."""


class _NoAnswerError(OutageError):
    """A question has used up its time, in all tries together."""


class TeacherRows:
    """The questions of one agent-loop worker to verl's teachers.

    Args:
        outages: The outages that this process knows.
        at_once: The most questions of this worker that are under way.
        width: Number of ids for each token, K; None: one, which has to be the row's own.
        words: Size of the trained model's vocabulary.
    """

    def __init__(self, outages: Outages, at_once: int, width: int | None, words: int) -> None:
        self._watch = outages.of(NAME, OutageLimits(), _LEASE_S) if outages.settings.mode == "pause" else None
        self._stop_s = outages.settings.stop_s
        self._slots = asyncio.Semaphore(at_once)
        self._width, self._words = width, words

    async def ask(self, outputs: Sequence[Any], ask: Ask, validate: bool = False) -> None:
        """Ask about every row of a conversation, all at once, and check the answers.

        After an outage it asks about those rows alone that have no answer.

        Args:
            outputs: The conversation's rows.
            ask: Asks about one of them, as verl does.
            validate: Whether it is a conversation of a validation: no teacher is asked then.

        Raises:
            OutageError: No server answered, for longer than `outage.stop_s` or in several attempts.
            TeacherContractError: An answer does not belong to its row, or has a number that is none, or was cut off in
                several attempts.
        """
        if validate:  # no loss is computed from its rows
            return
        conversation = str(getattr(outputs[-1], "stats", {}).get("request_id", id(outputs[-1])))

        left_s = {id(output): self._stop_s for output in outputs}

        async def once() -> OutageError | None:
            return await self._all([output for output in outputs if LOGPROBS not in output.extra_fields], ask, left_s)

        with during("teacher"):
            try:
                outage = await ask_through(
                    GuardedCall(self._watch, conversation, "reward"), once, _TRIES, (_NoAnswerError,)
                )
            except OutageEndError as error:
                raise OutageError(f"distillation: {error}") from None
        if outage is not None:
            raise outage

    async def _all(self, outputs: Sequence[Any], ask: Ask, left_s: dict[int, float]) -> OutageError | None:
        tasks = [asyncio.ensure_future(self._one(output, ask, left_s)) for output in outputs]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        failed = [answer for answer in answers if answer is not None]
        return next((answer for answer in failed if isinstance(answer, _NoAnswerError)), failed[0] if failed else None)

    async def _one(self, output: Any, ask: Ask, left_s: dict[int, float]) -> OutageError | None:
        """Ask about one row, again where the answer is cut off; return the outage that ended the question."""
        for again in range(_TRIES + 1):
            try:
                if (outage := await self._once(output, ask, left_s)) is not None:
                    return outage
                break
            except TeacherContractError:  # a ValueError
                raise
            except _VERLS_CHECKS as error:
                why = describe(getattr(error, "cause", error))
                if again == _TRIES:
                    raise _wrong(f"it was not given: {why}") from error
                logger.warning("a teacher's answer cannot be read, and is requested again: %s", why)
                await asyncio.sleep(2.0**again)
        self._accept(output)
        return None

    async def _once(self, output: Any, ask: Ask, left_s: dict[int, float]) -> OutageError | None:
        """Ask about one row once, within the rest of its `outage.stop_s`."""
        clock = asyncio.get_running_loop().time
        async with self._slots:
            began = clock()
            try:
                async with asyncio.timeout(left_s[id(output)]) as limit:
                    await ask(output)
            except Exception as error:  # an engine's client raises errors of its libraries; the others go on
                if limit.expired():
                    left_s[id(output)] = self._stop_s  # for a question after an outage
                    return _NoAnswerError(f"distillation: the teacher has not answered for {self._stop_s:g} s")
                left_s[id(output)] -= clock() - began
                if isinstance(error, RayActorError) or _NONE_LEFT in str(error) or _is_outage(error):
                    return OutageError(f"distillation: the teacher is not there: {describe(error)}")
                raise
        return None

    def _accept(self, output: Any) -> None:
        """Check the answer about a row, and note it in the row's receipts."""
        tokens = [*output.prompt_ids, *output.response_ids]
        ids, logprobs = (output.extra_fields.get(name) for name in (IDS, LOGPROBS))
        if wrong := fault(ids, logprobs, tokens, self._width, self._words):
            raise _wrong(wrong)
        if receipts := getattr(output, "receipts", b""):
            output.receipts = with_teacher(receipts, teacher_digest(np.array(tokens), ids.numpy(), logprobs.numpy()))


def _is_outage(error: Exception) -> bool:
    return cause_of(error, "outage", (), NOTHING, "service") == "outage"


_REMEDY = (
    "give it the vocabulary of the model that is trained, and a context of rollout.prompt_length + response_length + 1 "
    "tokens"
)


def _wrong(why: str, remedy: str = _REMEDY) -> TeacherContractError:
    return TeacherContractError(
        f"distillation: a teacher's answer is not the log-probs of the row's tokens: {why}; {remedy}"
    )


def fault(ids: Any, logprobs: Any, tokens: Sequence[int], width: int | None, words: int) -> str:
    """Return why a teacher's columns are not those of a row; "" where they are.

    Args:
        ids: `(S, K)` token ids.
        logprobs: `(S, K)` log-probs of theirs.
        tokens: The row's S ids, prompt and response.
        width: K; None: 1, with the row's own ids.
        words: Size of the trained model's vocabulary, whose logits the loss reads at the ids.
    """
    shape = (len(tokens), width or 1)
    for name, column in ((IDS, ids), (LOGPROBS, logprobs)):
        if not isinstance(column, torch.Tensor) or tuple(column.shape) != shape:
            found = tuple(column.shape) if isinstance(column, torch.Tensor) else type(column).__name__
            return f"{name} is {found}, expected {shape}"
    probabilities = logprobs.double().exp().sum(-1)
    least, most = LOGPROB
    good = ((logprobs >= least) & (logprobs <= most)).all(-1)  # NaN is in no range
    good[:-1] &= probabilities[:-1] <= _MOST_MASS  # the last entry is about no token: zeros, whatever K is
    if not bool(good.all()):
        at = int((~good).nonzero()[0])
        return f"{LOGPROBS} at token {at} of {len(tokens)} is {logprobs[at].tolist()!r}, expected log-probs"
    if width is None:
        own = torch.tensor(tokens[1:], dtype=ids.dtype)
        wrong = (ids[:-1, 0] != own).nonzero()
        if len(wrong):
            at = int(wrong[0])
            return f"{IDS} at token {at} of {len(tokens)} is {int(ids[at, 0])}, the row's next token is {int(own[at])}"
    elif bool(((ids < 0) | (ids >= words)).any()):
        outside = int(ids.min()) if bool((ids < 0).any()) else int(ids.max())
        return f"{IDS} has {outside}, expected ids from 0 to {words - 1}"
    elif bool((twice := (ids[:-1].sort(-1).values.diff(dim=-1) == 0).any(-1)).any()):
        at = int(twice.nonzero()[0])
        return f"{IDS} at token {at} of {len(tokens)} is {ids[at].tolist()!r}, expected each id once"
    return ""


class SglangTeacher:
    """verl's client of a teacher on SGLang, with questions and answers as SGLang has them.

    - verl 0.9.1 sends every teacher `detokenize`, a parameter of vLLM's, for which SGLang refuses the question.
    - SGLang 0.5.12 reads no embedding of an id that its model does not have: its process dies of it, or, with several
      devices, takes zeros. Such a question is not sent.
    - It writes 0 in the place of its vocabulary's last id, beside that id's log-prob. The id is put back.
    - It writes 0 in the place of each id of an image, too. Where the row's own ids count, such a row is not sent.

    Args:
        client: verl's `LLMServerClient`.
        words: Size of the teacher's vocabulary; None: it is not known here, and ids are neither checked nor put back.
    """

    def __init__(self, client: Any, words: int | None) -> None:
        self._client, self._words = client, words

    async def generate(self, *, prompt_ids: list[int], sampling_params: dict[str, Any], **given: Any) -> Any:
        """Send a question, and return verl's `TokenOutput`.

        Raises:
            TeacherContractError: A token of the row is not in the teacher's vocabulary, or the row has an image and the
                loss takes one id for each token.
        """
        takes_own = sampling_params["prompt_logprobs"] == 0
        if takes_own and (given.get("image_data") or given.get("video_data")):
            raise _wrong(
                "the row has an image, in whose place SGLang 0.5.12 writes 0 for each id",
                "set distillation_loss.loss_mode=forward_kl_topk, or take another engine for the teacher",
            )
        largest = max(prompt_ids)
        if self._words is not None and largest >= self._words:
            raise _wrong(f"the row has the token {largest}, and the teacher's are 0 to {self._words - 1}")
        taken = {name: value for name, value in sampling_params.items() if name != _OF_VLLM}
        output = await self._client.generate(prompt_ids=prompt_ids, sampling_params=taken, **given)
        if self._words is not None and largest == self._words - 1 and takes_own:
            ids = output.extra_fields["prompt_ids"]
            ids[:-1] = [
                [own] if own == largest and shown == [0] else shown
                for own, shown in zip(prompt_ids[1:], ids[:-1], strict=True)
            ]
        return output


def teacher_rows(manager: Any, config: DictConfig, outages: Outages, words: int) -> TeacherRows:
    """Return the questions of one worker of a run.

    The servers together run at most `inference.max_num_seqs` requests each; a worker has its share of them under way,
    and holds up the others.

    Args:
        manager: verl's `AsyncTeacherLLMServerManager` of the worker.
        config: verl's whole configuration.
        outages: The outages that this process knows.
        words: Size of the trained model's vocabulary.
    """
    teachers = manager.teacher_model_configs.values()
    for key, teacher in manager.teacher_model_configs.items():
        if teacher.inference.name in (ROLLOUT, SGLANG):
            words_there = vocabulary_size(teacher.model_path)
            manager.teacher_client[key] = SglangTeacher(manager.teacher_client[key], words_there)
    room = sum(each.inference.max_num_seqs * each.num_replicas for each in teachers)
    loss = manager.distillation_loss_config
    width = loss.topk if loss.loss_settings.use_topk else None
    at_once = max(1, math.ceil(room / config.actor_rollout_ref.rollout.agent.num_workers))
    return TeacherRows(outages, at_once, width, words)
