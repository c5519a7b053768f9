"""The form of a run's records on disk, schema 2: what each file holds, entry by entry.

    run-<start>.json                               RunFile       versions, settings, tools, hashes
    <start>-<host>-<pid>-<random>.jsonl.gz         Record        a JSON object for each conversation that ended
    <start>-<host>-<pid>-<random>.lines.jsonl      Line          a conversation began, ended, was cancelled, raised
    <start>-<host>-<pid>-<random>.open.json        Snapshot      what runs now; written anew every 2 s
    <start>-<host>-<pid>-<random>.sessions.jsonl   SessionLine   of a gateway: a session began, ended, got a reward
    steps.jsonl                                    StepLine      a line for each step and validation of the trainer
    join/step-<step>-<start>.parquet               JOINED        what the trainer made of each row
    join/validation-<step>-<start>.parquet         JOINED        what the validation scored of each row

`docs/reference/records.md` is written from this module, and a test compares both with what a run writes. Writers make
plain dictionaries (`encode.py`); these models are the description of them, and validate them in tests and for
strangers' files. All times are `time.time` of the host that wrote them, in seconds; the `RunFile` has the clocks'
offsets.

JSON has neither NaN nor infinity: the texts `nan`, `inf` and `-inf` stand for them. All text is valid UTF-8: half of a
surrogate pair becomes U+FFFD. A log-probability is written as the shortest decimal that is read as the same float32.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

SCHEMA = 2
"""Number of the schema. A reader refuses another one, by name."""

Number = float | Literal["nan", "inf", "-inf"]
Int32 = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Time = Annotated[float, Field(ge=0.0, lt=1e11, allow_inf_nan=False)]
"""Seconds since 1970; 0.0: not known. A time beyond the limit has no date, and no reader could show it."""
Message = dict[str, Any]


class _SchemaModel(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class ImageNote(_SchemaModel):
    """An image, which is not kept itself."""

    digest: str
    """Digest (blake2b-128, hexadecimal) of its mode, size and pixels."""
    size: tuple[int, int]
    """Width and height in pixels."""


class Sample(_SchemaModel):
    """The data set's entries for the conversation, and the input of its reward function."""

    index: Any = None
    """The column `index`, or `extra_info.index`; null: the row has none."""
    data_source: str | None = None
    """The column `data_source`."""
    ground_truth: Any = None
    """`reward_model.ground_truth`."""
    extra_info: Any = None
    """The column `extra_info`, as the reward function gets it."""
    messages: list[Message] = []
    """The row's own messages as they came, before anything is made harmless; an image is an `ImageNote`."""
    tools: list[str] = []
    """Names of the conversation's tools, in their order."""
    tools_kwargs: dict[str, Any] = {}
    """Arguments for the tools' methods."""
    interaction: str | None = None
    """Name of the interaction that answers; null: none."""
    interaction_kwargs: dict[str, Any] = {}
    """Arguments for the interaction's methods."""


class EvaluationRow(_SchemaModel):
    """Which row of an evaluation's file of rows a conversation was made of."""

    number: Int64
    """Number of the row in the file, from 0."""
    digest: str
    """Digest (blake2b-64, 16 hexadecimal digits) of the row's content, whatever its place (`row_files.row_digest`)."""


class Row(_SchemaModel):
    """One row of the training batch: a stretch of the conversation in which ids were only appended."""

    prompt_length: Int32
    """Tokens of the prompt."""
    ids: list[Int32]
    """Token ids, the prompt first."""
    logprobs: list[Number]
    """Log-probability of each sampled token (source 1), in order. A token that was not sampled has none."""
    runs: list[tuple[Int64, Int32, Int64, Int32, Int32]]
    """Runs of tokens that have the same values: count, mask, weight version (-1: none), turn, source. Sources are
    0 prompt, 1 sampled, 2 template, 3 observation, 4 injected, 5 earlier (`rollout.trajectory.Source`)."""
    images: list[ImageNote] = []
    """Images in the order of their placeholders."""


class Generation(_SchemaModel):
    """A request to the engine, and its result. They are in the order of sampling; so are turns."""

    prompt_tokens: Int32
    """Number of ids that the engine was given."""
    prompt_digest: str
    """Digest (blake2b-128) of those ids as little-endian int32."""
    max_tokens: Int64
    """Budget: the most tokens that were requested."""
    tokens: Int32
    """Number of tokens that it returned."""
    finish: str
    """Why it ended, in the engine's word: `stop`, `length`, `abort`; "" where it is not known."""
    digest: str
    """Digest (blake2b-128) of the receipt: lengths, budget, ids, logprobs and versions, as the engine returned them."""
    completion: str | None = None
    """Of an agent's session: id of its completion, as clients got it behind `chatcmpl-`, `msg_` or `resp_`; null: it
    became none."""
    row: Int64 | None = None
    """Row that holds it; null: none does."""
    start: Int64 | None = None
    """Position of its first token in the row's `ids`."""
    cause: str | None = None
    """Why no row holds it (`certificate.receipts.CAUSES`); null: one does."""
    ids: list[Int32] | None = None
    """Its ids, where no row holds them; else null. So with the next two."""
    logprobs: list[Number] | None = None
    versions: list[tuple[Int64, Int64]] | None = None
    """Runs: count, weight version."""
    cached_tokens: Int64 | None = None
    """Tokens of the prompt that the engine had in its cache; null: not reported."""
    parent: Int64 | None = None
    """Number of the generation that it continues; null: it begins anew."""
    summary: bool = False
    """Whether it is a summary that the model was asked for."""
    state: str | None = None
    """Digest of the environment's state in which the model acted."""
    reward: Number | None = None
    """Reward that an agent gave to it alone."""
    text: str | None = None
    """Text of the turn beside its calls; null where it was not read."""
    lane: Int64 | None = None
    """Of an agent's session: number of the lane in which the engine sampled it."""
    role: str | None = None
    """The role that it speaks for, one of `session.roles` or of `trained`; null: there are none."""
    call_ids: list[str] = []
    """Of an agent's session: ids of its calls, which the session gives."""
    asked_at: Time = 0.0
    """When the engine got the request."""
    at: Time = 0.0
    """When it had answered."""


class Call(_SchemaModel):
    """One tool call of the model, answered or refused."""

    turn: Int64
    """Number of the generation that holds it."""
    id: str
    """Id of the call."""
    tool: str
    """Name of the tool that answered; "" where the call could not be read, or named none."""
    name: str
    """Name that the model wrote."""
    arguments: Any = None
    """Arguments that the model wrote; of a call that could not be read, its text."""
    status: str
    """How it ended (`tools.running.results.CallStatus`)."""
    text: str
    """The whole answer, before it was shortened for the model; of a long one the first 1,000,000 characters."""
    images: list[ImageNote] = []
    """Images of the answer."""
    reward: Number = 0.0
    """Reward of the call."""
    metrics: dict[str, Any] = {}
    """Metrics that the tool reported."""
    attempts: Int64 = 0
    """How often `execute` was called."""
    cached: bool = False
    """Whether the answer came from the cache."""
    truncated: bool = False
    """Whether the model read less than the tool answered."""
    altered: bool = False
    """Whether zero-width spaces part control tokens in the answer."""
    queue_s: float = 0.0
    """Seconds that it waited for a slot."""
    seconds: float = 0.0
    """Seconds that it ran, all attempts together."""
    at: Time = 0.0
    """When the answer was there."""


class Reply(_SchemaModel):
    """An answer of the interaction: to a turn, or its opening."""

    turn: Int64 | None
    """Number of the generation that it answers; null: the opening."""
    text: str
    """Its text."""
    images: list[ImageNote] = []
    """Its images."""
    reward: Number | None = None
    """Its reward."""
    done: bool = False
    """Whether it ended the conversation."""
    truncated: bool = False
    """Whether it ended it before its time."""
    state: str | None = None
    """Digest of the state that it leads to."""
    metrics: dict[str, Any] = {}
    """Metrics that it reported."""
    shows: list[str] = []
    """Names of hidden tools that it showed the model."""
    at: Time = 0.0
    """When it was there."""


class SessionRequest(_SchemaModel):
    """One request of an agent behind the endpoint, in the order in which they came."""

    at: Time
    """When it came."""
    protocol: str
    """`chat`, `messages` or `responses`; `count_tokens` asks for no completion."""
    role: str | None = None
    """Name of the model in it, where that has to be a role; also where it is none, so that it was refused."""
    parent: Int64 | None = None
    """Generation that it continues; null: it begins anew."""
    shared: Int64 = 0
    """How many of its messages are those of the parent's whole conversation; `messages` has the others."""
    messages: list[Message] = []
    """Its messages after the shared ones, as the template gets them."""
    tools: list[Any] | int | None = None
    """Its tools; an integer: the same as those of that request, by its place here."""
    wishes: dict[str, Any] = {}
    """`n`, `max_tokens`, `stop`, `tool_choice` and other fields that change the answer."""
    generations: list[int] = []
    """Generations that answered it."""
    delivered: bool = False
    """Whether its client got the whole answer."""
    order: Int64 | None = None
    """Place in the order in which answers went to clients; null: none did."""
    refused: str | None = None
    """Code of the error that it got; null: none."""
    opponent: str | None = None
    """Name of the opponent that answered it (`proxy.opponents`); null: none did. Its answers are no generations."""
    said: list[Message] = []
    """The opponent's answers."""


class Session(_SchemaModel):
    """The part of a record that only an agent's session has."""

    task: str | None = None
    """Of a gateway's session: `task_id` of its start, which is the record's `uid`; null: it is of none."""
    user: str | None = None
    """Of a gateway's session: `user` of its start; null: none was named."""
    requests: list[SessionRequest] = []
    """Its requests."""
    events: list[tuple[Literal["request", "samples", "delivered", "left"], int, int]] = []
    """What happened in which order: a request came, its samples were begun or taken, its client got the answer, or had
    left before that; the request's place in `requests`; and how many generations there were by then. A request that
    could not be read is in none."""
    roots: Int64 = 0
    """Prompts that were rendered whole."""
    unenforced: dict[str, int] = {}
    """Requests that had a field which changes nothing, by the field's name."""
    reward: Number | None = None
    """The session's reward, by its agent or for its failure."""
    by_id: bool = False
    """Whether the agent gave rewards to completions alone."""
    rewards: dict[str, Number] = {}
    """Rewards by role, where the agent gave such ones; else `reward` is that of each role."""
    roles: list[str] = []
    """The roles in which it could ask (`proxy.roles`); empty: there are none."""
    trained: list[str] = []
    """Roles that are trained (`proxy.train`)."""
    opponents: dict[str, str] = {}
    """The opponents that played, by role (`proxy.opponents`)."""
    end: str = ""
    """How the agent ended: `returned`, `raised`, `exited`, `timed_out`, `stuck`, `failed`, `outage`,
    `unjudged`."""
    problem: str = ""
    """The error."""


class Span(_SchemaModel):
    """A stretch of time in a conversation."""

    kind: Literal[
        "generation", "pause", "wait", "call", "interaction", "create", "release", "reward", "teacher", "store",
        "request",
    ]  # fmt: skip
    """`wait` is that for a slot or for an outage's end, `pause` that of an engine that is stopped, `teacher` that for
    the log-probs of a teacher (`distillation.enabled`)."""
    name: str = ""
    """Name of the tool or interaction."""
    turn: Int64 | None = None
    """Number of the generation that it belongs to; null: to none."""
    start: Time
    """When it began."""
    end: Time
    """When it ended."""


class Record(_SchemaModel):
    """One conversation that ended or was cancelled, or one session of an agent."""

    schema_: Annotated[Literal[2], Field(alias="schema")] = 2
    """2."""
    request_id: str
    """Id of the request: unique, also among conversations of one name that were begun again."""
    uid: str
    """verl's id of the group."""
    number: Int64
    """Number of the conversation in its group (verl's `session_id`)."""
    rerolled_from: str | None = None
    """uid of the group in whose place this one was begun; null: none."""
    validation: bool
    """Whether it belongs to a validation."""
    step: Int64
    """Step of the trainer in which it was begun. The join has the one in which it was trained."""
    loop: str
    """Name of the agent loop."""
    status: Literal["finished", "cancelled"] = "finished"
    """`cancelled`: it was cut off. It has no rows, no generations, no score and no stop reason; its calls, answers and
    messages are those until then. It is in no mean and in no conversion, and is not trained on."""
    began: Time
    """When it began."""
    ended: Time
    """When it had ended, before its reward was computed."""
    row: EvaluationRow | None = None
    """Which row of the file of rows it was made of; null: it was begun by a trainer. `rows` are other rows: those that
    it gives."""
    model: str | list[str] | None = None
    """Digest (16 hexadecimal digits) of the weights that sampled it, or name and address of a model behind chat
    completions; null: weights of a trainer, which change. A list: digests of a gateway's deployments in their order, of
    which a token's weight version is the place."""
    sample: Sample
    """The data set's entries."""
    sampling: dict[str, Any]
    """Sampling parameters, under the engine's names."""
    stop_reason: str
    """Why it ended (`rollout.limits.StopReason`); "" where it was cancelled."""
    valid: bool
    """Whether it measures the model."""
    void: bool = False
    """Whether it has a void turn."""
    error: str = ""
    """The error; "" otherwise."""
    outages: list[str] = []
    """Names whose outage a call hit, such as `tool search`."""
    rows: list[Row]
    """Its rows, in order."""
    generations: list[Generation]
    """Its generations, in order."""
    calls: list[Call] = []
    """Its tool calls, in order."""
    replies: list[Reply] = []
    """Answers of its interaction, in order; the opening first."""
    messages: list[Message] = []
    """The conversation as the model saw it; of several rows, that of the last."""
    asked: Int64 = 0
    """How many of `messages` are the row's own."""
    calc_rewards: dict[str, Number] = {}
    """The result of each tool's `calc_reward`."""
    score: Number = 0.0
    """The interaction's score for the whole; of rewards by role, the assistant's."""
    scores: dict[str, Number] = {}
    """The interaction's rewards by role, where it gave such ones."""
    trained: list[str] = []
    """Names of the trained roles, where the user is trained, too (`train`)."""
    differences: list[str] = []
    """Differences between the template's rendering of the whole and the tokens."""
    time_up: str | None = None
    """Its activity when its time was up: `generate`, `tools`, `interaction`, `score`; null: it was not."""
    generate_s: float = 0.0
    """Seconds spent waiting for the engine; so with the next two."""
    tools_s: float = 0.0
    interaction_s: float = 0.0
    session: Session | None = None
    """The part of an agent's session; null for a conversation."""
    timeline: list[Span] = []
    """The events with their times."""


class ConversationLine(_SchemaModel):
    """A line about one conversation, beside the records: its beginning or its outcome.

    An entry that has its default is omitted, here and in the summary.
    """

    event: Literal["begin", "end", "cancel", "raise", "drop", "score"]
    """`drop`: it ended, and its record could not be kept. `score`: its reward was computed, after `end`."""
    request_id: str
    """As in `Record`, and so with the next entries."""
    uid: str = ""
    number: Int64 = 0
    validation: bool = False
    step: Int64 = 0
    rerolled_from: str | None = None
    at: Time
    """When it happened."""
    why: str = ""
    """Why it was cancelled (`cut`: enough siblings had ended; `cancelled`: the trainer no longer wanted it; `killed`),
    what it raised, why its record was dropped."""
    offset: Annotated[int, Field(ge=0, lt=1 << 62)] | None = None
    """Of `end` and `cancel`: position of the gzip member with its record; null: there is none (`record_share`)."""
    place: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    """Of `end` and `cancel`: number of the record in its member."""
    summary: Summary | None = None
    """Entries of `end` in a table."""
    score: Number | None = None
    """Of `score`: the whole reward."""
    verdicts: dict[str, Number | dict[str, Number]] = {}
    """Verdict of each criterion of the reward `rubric` by its name, or by the number of the turn; in `score` alone."""


class Summary(_SchemaModel):
    """A table's entries for a conversation that ended."""

    data_source: str | None = None
    index: Any = None
    stop_reason: str = ""
    valid: bool = True
    rows: Int64 = 1
    """Number of rows."""
    turns: Int64 = 0
    """Number of generations."""
    calls: Int64 = 0
    """Number of calls."""
    failed_calls: Int64 = 0
    """Calls whose status is not `ok`."""
    prompt_tokens: Int64 = 0
    """Tokens of the first row's prompt."""
    response_tokens: Int64 = 0
    """Tokens of all rows after their prompts."""
    sampled_tokens: Int64 = 0
    """Tokens that a row trains."""
    seconds: float = 0.0
    """Seconds from begin to end; the next three are parts of it."""
    generate_s: float = 0.0
    tools_s: float = 0.0
    interaction_s: float = 0.0


class SessionLine(_SchemaModel):
    """A line about a session of a gateway, on disk before its client is answered: its beginning, its end or a reward.

    The reward of a session is the value of the whole plus those of its generations. A value is the last reward without
    `id`, and the first of each `id` (`records.read.scores`). An entry that has its default may be omitted.
    """

    event: Literal["start", "end", "reward"]
    at: Time
    """When it happened."""
    session_id: str
    """Id of the session, the `request_id` of its record."""
    task_id: str | None = None
    """Of `start`: the task, which is the record's `uid`."""
    user: str | None = None
    """Of `start`: the user; null: none was named."""
    number: Int64 = 0
    """Of `start`: how many sessions of the task began before it in the folder."""
    key: str | None = None
    """Of `start`: SHA-256 (hexadecimal) of the session's key."""
    completions: list[str] = []
    """Of `end`: ids of its completions, in the order of the record's generations; "" for one that became none."""
    why: str = ""
    """Of `end`: `ended` by its client, `idle` for too long, `closed` with the gateway, or `dropped: ` and why it has no
    record."""
    generation: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    """Of `reward`: number of the generation that earned it; null: the whole session did."""
    reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Of `reward`: its value."""
    id: str | None = None
    """Of `reward`: name under which it counts once; null: it replaces the one before."""


class OpenConversation(_SchemaModel):
    """A conversation that is under way."""

    request_id: str
    uid: str = ""
    number: Int64 = 0
    validation: bool = False
    step: Int64 = 0
    began: Time
    doing: str
    """What it waits for: `generation`, `call NAME`, `wait NAME`, `interaction NAME`, `reward`, and so on."""
    since: Time
    """Since when."""
    turn: Int64 = 0
    """Turns so far."""


class Snapshot(_SchemaModel):
    """The waits of a worker's open conversations."""

    at: Time
    """When this was written."""
    open: list[OpenConversation]
    dropped: Int64 = 0
    """Records that could not be kept so far."""
    cpu_s: float = 0.0
    """CPU seconds of the thread that writes the worker's records so far."""


class RunFile(_SchemaModel):
    """The description of a run."""

    schema_: Annotated[Literal[2], Field(alias="schema")] = 2
    """2."""
    start: str
    """The start, as file names have it: `20261126T101500_9f3c2a`, UTC and a random part. It holds no `-`."""
    began: Time
    """When it began."""
    host: str
    """Host of the trainer's process."""
    versions: dict[str, str]
    """Versions of this package, verl, SGLang, torch, transformers and Python."""
    settings: dict[str, Any]
    """verl's whole configuration, resolved; values whose key names a secret are `***`."""
    tools: Any = None
    """The tools' YAML; null: none."""
    interactions: Any = None
    """The interactions' YAML; null: none."""
    schemas: list[Any] = []
    """Schemas of all tools, as the template gets them."""
    tokenizer: dict[str, Any] = {}
    """Path, class, vocabulary's size and a digest of the vocabulary."""
    template: dict[str, Any] = {}
    """Digest and text of the chat template."""
    reward_function: dict[str, Any] = {}
    """Path, name and digest of the file; {} for verl's own."""
    resumed_from: Int64 | None = None
    """Step of the checkpoint that it began with; null: none."""
    reference_step: Int64 | None = None
    """Step whose weights the reference of the KL term had at the start; 0: the model's; null: it is never reset."""


class Clock(_SchemaModel):
    """A line in the run's `steps.jsonl`: how far a worker's clock is from the trainer's."""

    event: Literal["clock"]
    file: str
    """Stem of the worker's files."""
    offset_s: float
    """Add this to the worker's times to get the trainer's."""
    error_s: float
    """How wrong it may be."""


class StepLine(_SchemaModel):
    """A line in `steps.jsonl`: a step of the trainer, or a validation, that is over."""

    event: Literal["step", "validation"]
    start: str
    """`RunFile.start` of the run."""
    step: Int64
    began: Time
    ended: Time
    phases: dict[str, float]
    """Seconds of the trainer's phases (verl's `timing_s`)."""
    join: str | None
    """Name of the Parquet file; null: it could not be written."""
    rows: Int64
    """Rows in it."""
    metrics: dict[str, Number]
    """All metrics of the step, as loggers get them."""
    evicted: list[str] = []
    """uids of groups that were too old, and so with the next: excluded by a group filter (`algorithm.filter_groups`, or
    `custom.multiturn.filter=refill`), failed, and begun anew (old uid → new uid)."""
    filtered: list[str] = []
    failed: list[str] = []
    rerolled: dict[str, str] = {}
    discarded: list[str] = []
    """uids of groups that had finished when enough others had (DAPO's filter in `sync`)."""


class RunEnd(_SchemaModel):
    """A line in `steps.jsonl`: the run is over. A run that was killed leaves none."""

    event: Literal["end"]
    start: str
    """`RunFile.start` of the run."""
    at: Time
    """When it ended."""
    error: str = ""
    """The cause of its end before its last step; "" otherwise."""


SPARED = ("no_signal", "zero_advantage")
"""Causes for which `custom.multiturn.filter` takes a row out of the update: its group had no signal, and was skipped;
or the row's own advantages are all 0."""
UNTRAINED = (
    "void", "too_old", "invalid", "outage", "reward_outage", "rejected", "skipped_update", *SPARED, "unsampled",
    "collected",
)  # fmt: skip
"""Causes in the join's column `untrained`: of a whole row, or (`too_old`, `rejected`) of some of its tokens.
`skipped_update`: the actor was not updated (critic warm-up); `unsampled`: the row has no sampled token; `collected`: a
gateway's session, which no trainer had. verl's rows of padding are not in the file."""

_FLOATS = pa.list_(pa.float32())
JOINED = pa.schema(
    [
        ("request_id", pa.string()),
        ("uid", pa.string()),
        ("number", pa.int32()),
        ("row", pa.int32()),
        ("validation", pa.bool_()),
        ("step", pa.int32()),  # of the trainer
        ("update", pa.int32()),  # which of the step's optimizer steps, the first epoch's; null: none, or it is drawn
        ("role", pa.string()),  # whose turns it holds, of proxy.roles or train; null: there are none
        ("score", pa.float64()),  # verl's sum of token-level scores, before KL
        # JSON, an object of numbers: compute_score, tool_score, interaction_score, completion_score as far as the
        # reward has these parts, and the other numbers that the reward function reported; `verdicts` is an object of
        # such, as in the line of a score
        ("parts", pa.string()),
        ("otc_factor", pa.float64()),
        # of the scores of the group's valid conversations, with roles of the row's; null: none, or an evaluation
        ("group_mean", pa.float64()),
        ("group_std", pa.float64()),  # of the same, with n - 1 as in GRPO; null: fewer than two
        ("advantages", _FLOATS),  # of the row's sampled tokens, in order; so with the next
        ("old_log_probs", _FLOATS),
        ("ref_log_probs", _FLOATS),
        ("importance_weights", _FLOATS),
        ("entropy", pa.list_(pa.float16())),
        ("trained", pa.int32()),  # sampled tokens that the loss counted
        ("untrained", pa.string()),  # one of UNTRAINED; null: all sampled tokens are trained
        ("untrained_tokens", pa.list_(pa.int32())),  # which sampled tokens are not trained, where only some are not
    ]
)
"""Columns of a join's Parquet file. A column that the trainer does not have (no reference, bypass mode) is null."""
