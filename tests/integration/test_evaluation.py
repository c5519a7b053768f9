"""An evaluation of the quickstart's rows by verl's data set, our loop and its reward; the engine is a script."""

import asyncio
import errno
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from aiohttp import web
from rich.console import Console
from transformers import AutoTokenizer

from tests.conftest import ROOT, until
from tests.recipe_scripts import RECIPES, script
from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.errors import ConfigError, EngineError, OutageError, RewardContractError
from verl_multiturn.evaluation.compare import compare, comparison_summary
from verl_multiturn.evaluation.results import read_results
from verl_multiturn.evaluation.tables import summary_of, table_of
from verl_multiturn.models.hash import model_hash
from verl_multiturn.observe.explain.explanation import explain
from verl_multiturn.records.read import joins
from verl_multiturn.records.read.learning import SelectionRule, choose
from verl_multiturn.records.read.records import Records
from verl_multiturn.records.verify.folder import verify_files
from verl_multiturn.rollout.engines import http_engine
from verl_multiturn.runs.benchmark import benchmark_options, plan_benchmark
from verl_multiturn.runs.plan import plan_run
from verl_multiturn.tools.calculator import CalculatorTool

pytestmark = [
    pytest.mark.stack,
    pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning"),
]
MODEL = ROOT / "recipes" / "quickstart" / "model"
WEIGHTS = model_hash(MODEL)
Script = Callable[[str], str | int]
"""Returns the model's continuation of a text, or the status of an error."""


class Server:
    """SGLang's `/generate` on this machine, in a thread, which answers by a script."""

    def __init__(self) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
        self.script: Script = lambda text: "0"
        self.chat: Callable[[list[dict[str, Any]]], dict[str, Any] | int] = lambda messages: 500
        """Returns the message that follows on others, or the status of an error."""
        self.asked = 0
        self.url = ""
        self._loop = asyncio.new_event_loop()

    async def _generate(self, request: web.Request) -> web.Response:
        self.asked += 1
        said = self.script(self.tokenizer.decode((await request.json())["input_ids"]))
        if isinstance(said, int):
            return web.Response(status=said)
        ids = [*self.tokenizer.encode(said, add_special_tokens=False), self.tokenizer.eos_token_id]
        about = {
            "weight_version": WEIGHTS,
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        return web.json_response({"output_ids": ids, "meta_info": about})

    async def _chat(self, request: web.Request) -> web.Response:
        self.asked += 1
        said = self.chat((await request.json())["messages"])
        if isinstance(said, int):
            return web.Response(status=said)
        finish = "tool_calls" if said.get("tool_calls") else "stop"
        return web.json_response({"choices": [{"message": said, "finish_reason": finish}]})

    async def _model(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": WEIGHTS})

    async def _serve(self, ready: threading.Event) -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/get_model_info", self._model)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        self.url = f"http://{host}:{port}"
        ready.set()
        return runner

    def run(self, ready: threading.Event) -> None:
        """Serve until `stop`."""
        runner = self._loop.run_until_complete(self._serve(ready))
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    def stop(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(http_engine, "_PAUSES_S", (0.0, 0.0, 0.0))
    found, ready = Server(), threading.Event()
    thread = threading.Thread(target=found.run, args=(ready,), daemon=True)
    thread.start()
    ready.wait()
    yield found
    found.stop()
    thread.join()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rows, of which the first is answered by 3 and the second by 4."""
    made = [
        {
            "data_source": "reasoning_gym/chain_sum",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": index, "question": question, "answer": answer},
        }
        for index, (question, answer) in enumerate([("1 + 2 =", "3"), ("2 + 2 =", "4")])
    ]
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(made), path)
    return path


def evaluate(*args: Any) -> bool:
    from verl_multiturn.verl_bridge.offline.evaluate import command  # verl warns when it is imported

    return command.evaluate(*args)


def job(out: Path, rows: Path, server: Server, *overrides: str, **changes: Any) -> Any:
    plan = plan_run("quickstart", out=out, overrides=overrides)
    from verl_multiturn.verl_bridge.offline.evaluate.settings import Job

    return Job(plan, MODEL, WEIGHTS, "model", rows=(rows,), samples=2, **{"engine": server.url, **changes})


def quiet(text: str) -> None:
    """Take a line of progress."""


def calls_then_answers(text: str) -> str | int:
    """Let the calculator add 1 and 2, and repeat its answer."""
    if "tool_response" in text:
        return "Answer: 3"
    return '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 2"}}\n</tool_call>'


def test_what_an_engine_failed_is_asked_again_and_nothing_else(tmp_path: Path, rows: Path, server: Server) -> None:
    server.script = lambda text: 500 if "2 + 2" in text else calls_then_answers(text)
    asked = job(tmp_path, rows, server)
    assert not evaluate(asked, quiet, quiet)
    half = read_results(tmp_path)
    assert (half.whole, half.count("scored"), half.count("invalid")) == (1, 2, 2)
    server.script, server.asked = calls_then_answers, 0
    assert evaluate(asked, quiet, quiet)
    assert server.asked == 4  # two turns of each of the two samples
    results = read_results(tmp_path)
    assert [(row.number, [(each.score, each.calls) for each in row.samples]) for row in results.shown] == [
        (0, [(1.0, 1), (1.0, 1)]),
        (1, [(0.0, 1), (0.0, 1)]),
    ]
    verdicts = list(verify_files([tmp_path]))
    assert [verdict.verified is not None and list(verdict.verified.violations) for verdict in verdicts] == [[]] * 6
    assert not ray.is_initialized()
    server.asked = 0
    assert evaluate(asked, quiet, quiet)
    assert server.asked == 0  # nothing remains
    with pytest.raises(ConfigError, match=r"holds an evaluation with temperature 0\.0, and this one has 1\.0"):
        evaluate(job(tmp_path, rows, server, temperature=1.0), quiet, quiet)


def test_a_tool_that_holds_up_all_conversations_is_named(
    tmp_path: Path, rows: Path, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def blocks(*_: Any, **__: Any) -> str:
        while "has held up" not in caplog.text:  # the fault under test
            time.sleep(0.01)  # noqa: ASYNC251
        return "3"

    server.script = calls_then_answers
    monkeypatch.setattr(CalculatorTool, "execute", blocks)
    assert evaluate(job(tmp_path, rows, server), quiet, quiet)
    assert "tool 'calculator': execute has held up the event loop" in caplog.text


def test_a_reward_that_raises_is_counted_apart(tmp_path: Path, rows: Path, server: Server) -> None:
    (tmp_path / "raises.py").write_text("def compute_score(**given):\n    raise ZeroDivisionError('no')\n")
    override = f"reward.custom_reward_function.path={tmp_path / 'raises.py'}"
    lines: list[str] = []
    assert not evaluate(job(tmp_path / "out", rows, server, override), lines.append, quiet)
    results = read_results(tmp_path / "out")
    assert (results.count("failed"), results.count("invalid"), results.count("scored")) == (4, 0, 0)
    raised = [line for line in lines if "raised" in line]
    assert [line.partition(": ")[2] for line in raised] == [
        "the reward function raised ZeroDivisionError: no (raises.py:2); further ones are counted"
    ]


FUNCTION = "reward.custom_reward_function"


def routed(pattern: str, name: str) -> list[str]:
    """Return the overrides of an evaluation by our `compute_score` with one route."""
    ours = [f"{FUNCTION}.path='pkg://verl_multiturn.rewards'", f"{FUNCTION}.name=compute_score"]
    return [*ours, f"+{FUNCTION}.reward_kwargs.routes={{{pattern}: {name}}}"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (routed("reasoning*", "eval_rewards.rewrad"), "routes['reasoning*']: 'eval_rewards' has no 'rewrad'; did you"),
        (routed("reasoning*", "eval_rewards.narrow"), "'eval_rewards.narrow' cannot be called with (solution, ground"),
        ([f"{FUNCTION}.path={{tmp}}/eval_rewards.py"], "eval_rewards.py) cannot be called as verl calls it"),
        (routed("your/*", "eval_rewards.reward"), "data_source 'reasoning/sum' has no reward; known are ['your/*', "),
    ],
    ids=["name", "signature", "compute_score", "data_source"],
)
def test_a_reward_that_could_not_be_called_is_refused_before_a_conversation(
    overrides: list[str], said: str, tmp_path: Path, rows: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "eval_rewards.py").write_text(
        "def reward(solution, ground_truth): ...\ndef narrow(solution): ...\ndef compute_score(solution, truth): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "eval_rewards", raising=False)
    table = pq.read_table(rows)
    sources = pa.array(["reasoning/sum"] * len(table))
    other = tmp_path / "rows.parquet"
    pq.write_table(table.set_column(table.column_names.index("data_source"), "data_source", sources), other)
    words = [word.replace("{tmp}", str(tmp_path)) for word in overrides]
    with pytest.raises(ConfigError, match=re.escape(said)):
        evaluate(job(tmp_path / "out", other, server, *words), quiet, quiet)
    assert server.asked == 0


def test_a_routed_reward_that_raises_is_named_in_table_and_symptoms(
    tmp_path: Path, rows: Path, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "eval_raises.py").write_text(
        "def reward(solution, truth):\n    return solution.extra_info['user_txts']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert evaluate(job(tmp_path / "out", rows, server, *routed("reasoning*", "eval_raises.reward")), quiet, quiet)
    results = read_results(tmp_path / "out")
    found = summary_of(results)
    assert (found["rewards_failed"], found["rewards_timed_out"], found["failed"], found["avg"]) == (4, 0, 0, 0.0)
    said = [record.getMessage() for record in caplog.records if "eval_raises" in record.getMessage()]
    assert len(said) == 1
    begin, end = (
        "reward 'eval_raises.reward' failed with KeyError: 'user_txts' (eval_raises.py:2), for the ",
        "row with ",
    )
    assert said[0].startswith(f"{begin}{end}extra_info.index ")
    symptoms = [(each.symptom, each.kind) for each in explain(Records(tmp_path / "out"))]
    assert symptoms[0] == ("rewards_fail", "alarm")


@pytest.mark.parametrize("add", [False, True])
def test_a_reward_function_that_forgets_to_return_ends_it(
    add: bool, tmp_path: Path, rows: Path, server: Server
) -> None:
    file = tmp_path / "forgets.py"
    file.write_text("def compute_score(ground_truth, **given):\n    pass\n", encoding="utf-8")
    overrides = [f"reward.custom_reward_function.path={file}"]
    if add:
        overrides.append("+actor_rollout_ref.rollout.custom.multiturn.tool_reward.mode=add")
    asked = job(tmp_path / "out", rows, server, *overrides)
    with pytest.raises(RewardContractError) as ended:
        evaluate(asked, quiet, quiet)
    begin, _, end = str(ended.value).partition(" was given the row with ")
    assert begin == f"the reward function compute_score ({file})"
    assert end.endswith(
        "and returned None; return a number on every path, or raise UnjudgedError where there is no verdict"
    )
    assert read_results(tmp_path / "out").count("scored") == 0


def test_what_an_outage_has_touched_is_not_scored_and_run_again(
    tmp_path: Path, rows: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn.verl_bridge.offline.evaluate.conversations import Conversations

    real, called, ended = Conversations.run, [], []

    async def refused(*_: Any, **__: Any) -> Any:
        called.append(0)
        if len(called) == 4:  # the last one opens the breaker when the others have ended
            await until(lambda: len(ended) == 3)
        raise OutageError("connection refused")

    async def run(*given: Any) -> Any:
        judged = await real(*given)
        ended.append(judged.score)
        return judged

    lines: list[str] = []
    server.script, asked = calls_then_answers, job(tmp_path, rows, server)
    with monkeypatch.context() as patched:
        patched.setattr(CalculatorTool, "execute", refused)
        patched.setattr(CalculatorTool, "outage_limits", OutageLimits())
        patched.setattr("verl_multiturn.calls.outages.breaker.LEAST_CALLS", 4)
        patched.setattr(Conversations, "run", run)
        assert not evaluate(asked, lines.append, quiet)
    assert [score is None for score in ended] == [False, False, False, True]
    assert lines[-1] == "rows 0 of 2 whole, 0 of 4 conversations, 4 invalid"
    (join,) = (tmp_path / "records" / "join").iterdir()
    table = pq.read_table(join).to_pylist()
    untrained = sorted((row["untrained"], row["score"] is None) for row in table)
    assert untrained == [("invalid", True), *[("outage", False)] * 3]
    assert read_results(tmp_path).count("scored") == 0
    assert evaluate(asked, quiet, quiet)
    assert read_results(tmp_path).whole == 2


def test_scores_that_cannot_be_written_end_it_with_a_sentence(
    tmp_path: Path, rows: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(joins, "write", full)
        with pytest.raises(ConfigError, match=r"the scores cannot be written into .*No space left.*; make room"):
            evaluate(job(tmp_path, rows, server), quiet, quiet)
    assert evaluate(job(tmp_path, rows, server), quiet, quiet)
    assert read_results(tmp_path).whole == 2


async def test_a_disk_that_was_full_for_a_moment_loses_no_later_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn.verl_bridge.offline.evaluate import command

    written, tries = threading.Event(), []

    def once_full(folder: Path, name: str, table: pa.Table) -> None:
        tries.append(len(table))
        if len(tries) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.set()

    monkeypatch.setattr(joins, "write", once_full)
    monkeypatch.setattr(command, "_SAVE_S", 0.0)
    growing = command._Joins(tmp_path, "20261126T101500_9f3c2a")
    growing.add([joins.JoinedRow("0-0-9f3c2a", "0", 0, 0, validation=True, step=0)])
    saving = asyncio.ensure_future(growing.keep_saving())
    assert await asyncio.to_thread(written.wait, 60)
    saving.cancel()
    assert tries[:2] == [1, 1]


def test_other_tools_than_the_models_run_had_are_refused(tmp_path: Path, rows: Path, server: Server) -> None:
    origin = {"schemas": [{"type": "function", "function": {"name": "search"}}]}
    with pytest.raises(ConfigError, match=r"the tools are \['calculator'\], the run's \['search'\]; say --anyway"):
        evaluate(job(tmp_path, rows, server, origin=origin), quiet, quiet)
    assert server.asked == 0


def test_an_engine_that_is_lost_ends_the_evaluation(
    tmp_path: Path, rows: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(self: Any, path: str, body: Any) -> dict[str, Any]:
        self.give_up("the engine has died")
        raise EngineError(self.lost)

    monkeypatch.setattr(http_engine.GenerateEngine, "_post", lost)
    with pytest.raises(EngineError, match=r"the engine has died; rows 0 of 2 whole, .* invalid; repeat the command"):
        evaluate(job(tmp_path, rows, server), quiet, quiet)
    assert read_results(tmp_path).count("scored") == 0


def chats(messages: list[dict[str, Any]]) -> dict[str, Any] | int:
    """Let the calculator add 1 and 2, and repeat its answer."""
    if messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": f"Answer: {messages[-1]['content']}"}
    function = {"name": "calculator", "arguments": '{"expression": "1 + 2"}'}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": function}]}


def test_a_model_behind_chat_completions_stands_beside_ones_own(tmp_path: Path, rows: Path, server: Server) -> None:
    server.script, server.chat = (
        calls_then_answers,
        lambda messages: 500 if "2 + 2" in str(messages) else chats(messages),
    )
    engine = f"{server.url}/v1/chat/completions#big/model"
    asked = job(tmp_path / "chat", rows, server, engine=engine)
    assert not evaluate(asked, quiet, quiet)
    assert read_results(asked.out).count("invalid") == 2
    server.chat, server.asked = chats, 0
    assert evaluate(asked, quiet, quiet)
    assert server.asked == 5  # whether the model answers, and two turns of each of the two samples
    assert evaluate(job(tmp_path / "own", rows, server), quiet, quiet)
    own, chat = read_results(tmp_path / "own"), read_results(tmp_path / "chat")
    for results in (own, chat):
        assert [[(each.score, each.calls) for each in row.samples] for row in results.shown] == [
            [(1.0, 1), (1.0, 1)],
            [(0.0, 1), (0.0, 1)],
        ]
    name = f"big/model at {server.url}/v1"
    assert (chat.evaluation.engine, chat.evaluation.model.hash) == ("chat", name)
    assert summary_of(chat)["model"] == name
    console = Console(width=200, record=True, file=StringIO())
    console.print(table_of(chat))
    assert f"model {name}, 2 samples a row at temperature 0.0, engine chat" in console.export_text()
    (run, *_) = Records(tmp_path / "chat").runs
    assert run["settings"]["evaluation"]["engine"] == "chat"
    assert comparison_summary(compare(own, chat))["other_settings"] == {"engine": ["ids", "chat"]}
    verdicts = list(verify_files([tmp_path / "chat"]))
    assert all(verdict.verified is not None and not list(verdict.verified.violations) for verdict in verdicts)
    with pytest.raises(ConfigError, match=r"nothing is left to learn from: .*4 of an endpoint, which proves no tokens"):
        choose([tmp_path / "chat"], SelectionRule())
    with pytest.raises(
        ConfigError, match=r"holds an evaluation with model .*big/model at .*, and this one has .*other"
    ):
        evaluate(job(tmp_path / "chat", rows, server, engine=engine.replace("big/model", "other")), quiet, quiet)


def test_an_evaluation_by_name_has_its_departures_from_the_protocol(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [{"question": "What is 1 + 2?", "answer": "#### 3"}, {"question": "And 2 + 2?", "answer": "#### 4"}]
    fetched, out = tmp_path / "test.jsonl", tmp_path / "out"
    fetched.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    plan, named = plan_benchmark(
        benchmark_options(
            "gsm8k", [fetched], [], False, ["data.max_response_length=64", "data.max_prompt_length=2048"]
        ),
        out,
    )
    monkeypatch.syspath_prepend(str(RECIPES / "benchmarks" / "single_turn"))
    words = ["--out", str(out / "data"), "--benchmark", "gsm8k", "--source", str(fetched)]
    monkeypatch.setattr("sys.argv", ["prepare_data.py", *words])
    script("benchmarks/single_turn").main()
    server.script = lambda text: "#### 3" if 'the final answer after "####".' in text else 500
    from verl_multiturn.verl_bridge.offline.evaluate.settings import Job

    assert evaluate(Job(plan, MODEL, WEIGHTS, "m", samples=2, engine=server.url, benchmark=named), quiet, quiet)
    results = read_results(out)
    departures = ["n 2 in the place of 1", "length 64 in the place of 1024", "rows 2 in the place of 1319"]
    departures.append("--set data.max_prompt_length=2048")
    departures.append("a context of 2048 tokens, where prompt and response may have 2112")
    told = summary_of(results)
    assert (told["avg"], told["benchmark"]) == (0.5, {"name": "gsm8k", "departures": departures})
    console = Console(file=StringIO(), width=300)
    console.print(table_of(results))
    assert f"benchmark gsm8k; departures from its protocol: {', '.join(departures)}" in console.file.getvalue()  # type: ignore[attr-defined]
