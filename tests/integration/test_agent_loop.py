"""The interface between verl and our loop: the engine behind verl's client, sampling parameters, the output."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.conftest import ROOT, EchoTool
from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.calls.outages.process import Outages
from verl_multiturn.calls.slots import Gates
from verl_multiturn.config import OutageSettings, ScoreSettings
from verl_multiturn.rollout.engines.protocol import Ask
from verl_multiturn.rollout.limits import Limits
from verl_multiturn.tools.running.gate import Gate

pytestmark = pytest.mark.stack

MODEL = ROOT / "recipes" / "quickstart" / "model"


def answer(ids: list[int], logprobs: list[float] | None, reason: str = "completed", **versions: int) -> Any:
    return SimpleNamespace(token_ids=ids, log_probs=logprobs, stop_reason=reason, extra_fields=versions)


async def ask(output: Any) -> tuple[Any, dict[str, Any]]:
    from verl_multiturn.verl_bridge.servers.verl_engine import VerlEngine

    asked: dict[str, Any] = {}

    async def generate(**kwargs: Any) -> Any:
        asked.update(kwargs)
        if isinstance(output, Exception):
            raise output
        return output

    return await VerlEngine(generate).generate(Ask("r1", [1, 2], {"temperature": 0.5}, 7)), asked


async def test_the_engine_behind_verls_client() -> None:
    from verl_multiturn import EngineError

    generation, asked = await ask(answer([5, 6, 7], [-1.0, -2.0, -3.0], min_global_steps=3, max_global_steps=5))
    assert (generation.ids, generation.logprobs, generation.finish) == ([5, 6, 7], [-1.0, -2.0, -3.0], "stop")
    assert generation.versions == [3, 3, 5]
    assert asked == {
        "request_id": "r1",
        "prompt_ids": [1, 2],
        "sampling_params": {"temperature": 0.5, "logprobs": True, "max_new_tokens": 7},
    }
    assert (await ask(answer([5], [-1.0], "length", global_steps=4)))[0].versions == [4]
    assert (await ask(answer([5], [-1.0], "length")))[0].finish == "length"
    assert (await ask(answer([5], [-1.0], "aborted")))[0].finish == "abort"
    assert (await ask(answer([5], [-1.0])))[0].versions == [-1]
    for broken in (answer([5, 6], [-1.0]), answer([5, 6], None), ConnectionError("the server died")):
        with pytest.raises(EngineError, match=r"2 ids came with|ConnectionError: the server died"):
            await ask(broken)


def runner(
    engine: Any,
    tool_format: str = "hermes",
    tokenizer: Any = None,
    model_type: str = "qwen2",
    sanity_check: str = "disable",
) -> Any:
    from transformers import AutoTokenizer

    from verl_multiturn.verl_bridge.loops.runner import build_runner
    from verl_multiturn.verl_bridge.model.loading import LoadedModel

    multi_turn = {
        "max_assistant_turns": 5,
        "max_user_turns": None,
        "max_parallel_calls": 2,
        "max_tool_response_length": 100,
        "tool_response_truncate_side": "middle",
        "tool_config_path": str(ROOT / "tool_configs" / "calculator.yaml"),
        "format": tool_format,
        "tokenization_sanity_check_mode": sanity_check,
    }
    rollout = {"prompt_length": 600, "response_length": 400, "multi_turn": multi_turn}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    model = LoadedModel(tokenizer or AutoTokenizer.from_pretrained(MODEL), model_type)
    return build_runner(config, model, engine)


def test_a_service_that_may_hang_for_longer_than_a_conversation_is_told(caplog: pytest.LogCaptureFixture) -> None:
    from verl_multiturn.verl_bridge.loops import runner

    limits, told = Limits(prompt_length=600, response_length=400, wall_clock_s=30.0), []
    for timeout_s, timeouts in ((30.0, "outage"), (29.0, "outage"), (30.0, "model")):
        tool = EchoTool()
        tool.outage_limits = OutageLimits(timeouts=timeouts)  # type: ignore[misc]
        gates = Gates(Gate, timeout_s, outages=Outages(OutageSettings()))
        runner._warn_of_clocks([gates.of(tool)], limits)
        told.append("request_timeout_s=30" in caplog.text)
        caplog.clear()
    assert told == [True, False, False]


class Versions:
    """An engine that answers with a newer weight version at each turn."""

    def __init__(self, turns: list[list[int]]) -> None:
        self.turns = turns
        self.version = 3

    async def generate(self, ask: Ask) -> Any:
        from verl_multiturn import Generation

        said, self.version = self.turns.pop(0), self.version + 1
        return Generation(said, [-0.5] * len(said), [self.version] * len(said), "stop")


async def test_the_output_that_verl_gets() -> None:
    from transformers import AutoTokenizer
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    from verl_multiturn.verl_bridge.loops.output import to_outputs

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 1"}}\n</tool_call>'
    turns = [tokenizer.encode(call + call + "<|im_end|>"), tokenizer.encode("2<|im_end|>")]
    first, last = map(len, turns)
    made = runner(Versions(turns))
    few_shots = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "calculator", "arguments": {"expression": "1 + 1"}}}]},  # noqa: E501
        {"role": "tool", "content": "2", "tool_call_id": "c"},
        {"role": "assistant", "content": "few-shot 2"},
        {"role": "user", "content": "Again?"},
    ]  # fmt: skip
    request = await made.request({"raw_prompt": few_shots}, {}, "r1")
    outcome, _ = await made.run(request)
    outcome.generate_s, outcome.tools_s = 2.5, 0.5
    (output,) = to_outputs(outcome, made.output_settings, step=9)
    assert (output.metrics.generate_sequences, output.metrics.tool_calls) == (2.5, 0.5)
    output.reward_score, output.turn_rewards, output.void = 1.0, [(0, 0.5)], True
    ours = type(output).model_fields.keys() - AgentLoopOutput.model_fields.keys()
    for name in ours:
        setattr(output, name, getattr(output, name))  # verl leaves out the fields that nobody set
    assert {"is_last", "earned", "void"} < ours
    assert not ours & output.as_dict().keys(), "verl would write them as columns"
    fields = output.extra_fields
    assert fields["assistant_texts"] == ["", "2"]
    assert (fields["min_global_steps"], fields["max_global_steps"]) == (4, 5)
    assert fields["call_statuses"] == ["ok", "ok"]
    assert output.num_turns == 4  # prompt, turn, the tools' answers, turn
    mask = output.response_mask
    assert (mask[:first], mask[-last:], sum(mask)) == ([1] * first, [1] * last, first + last)
    assert output.versions[:first] + output.versions[-last:] == [4] * first + [5] * last
    assert set(output.versions[first:-last]) == {-1}
    tools = [message for message in outcome.messages if message["role"] == "tool"][1:]
    asked = next(message for message in outcome.messages[5:] if message["role"] == "assistant")["tool_calls"]
    assert [message["tool_call_id"] for message in tools] == [each["id"] for each in asked]


async def test_rewards_of_an_interaction_that_nothing_uses_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoTokenizer

    from verl_multiturn.verl_bridge.loops import output as certified_output

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    made = runner(Versions([tokenizer.encode("2<|im_end|>")]))
    outcome, _ = await made.run(await made.request({"raw_prompt": [{"role": "user", "content": "1+1"}]}, {}, "r1"))
    certified_output._say_unused.cache_clear()
    certified_output.to_outputs(outcome, made.output_settings, step=9)
    assert "only reported" not in caplog.text
    monkeypatch.setattr(certified_output, "interaction_scores", lambda outcome, weight: [[(0, 0.5)]])
    for _ in range(2):
        (output,) = certified_output.to_outputs(outcome, made.output_settings, step=9)
        assert "interaction_score" not in output.stats
    assert caplog.text.count("an interaction gives rewards, and they are only reported") == 1
    certified_output._say_unused.cache_clear()
    explicit = replace(made.output_settings, interaction_reward=ScoreSettings(mode="none"))
    certified_output.to_outputs(outcome, explicit, step=9)
    assert caplog.text.count("an interaction gives rewards, and they are only reported") == 1


async def test_one_without_a_response() -> None:
    from transformers import AutoTokenizer

    from verl_multiturn.verl_bridge.loops.output import to_outputs

    made = runner(Versions([]))
    request = await made.request({"raw_prompt": [{"role": "user", "content": "long " * 2000}]}, {}, "r1")
    outcome, _ = await made.run(request)
    (output,) = to_outputs(outcome, made.output_settings, step=9)
    pad = AutoTokenizer.from_pretrained(MODEL).pad_token_id
    assert (output.response_ids, output.response_mask, output.response_logprobs) == ([pad], [0], [0.0])
    assert (len(output.prompt_ids), output.extra_fields["min_global_steps"]) == (600, 9)
    # The prompt's end is kept, where the template's header is.
    assert output.prompt_ids == outcome.trajectory.ids[-600:] != outcome.trajectory.ids[:600]
    assert output.extra_fields["stop_reason"] == "prompt_too_long"


async def test_the_step_stands_for_versions_that_the_engine_does_not_know() -> None:
    from verl_multiturn import ScriptedEngine
    from verl_multiturn.verl_bridge.loops.agent_loop import MultiTurnAgentLoop

    loop = object.__new__(MultiTurnAgentLoop)
    loop._runner = runner(ScriptedEngine([[5, 2]], version=-1))
    for row, step in (({"global_steps": 4}, 4), ({"global_steps": None}, 0), ({}, 0)):
        row = {"raw_prompt": [{"role": "user", "content": "1+1"}], "uid": "u", "session_id": 0, **row}
        output = await loop.run({"temperature": 1.0, "logprobs": True}, **row)
        assert output.versions == [-1, -1]
        assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (step, step)


def test_every_limit_of_the_configuration_is_the_conversations() -> None:
    from transformers import AutoTokenizer

    from verl_multiturn import Limits, ScriptedEngine
    from verl_multiturn.verl_bridge.loops.runner import build_runner
    from verl_multiturn.verl_bridge.model.loading import LoadedModel

    multi_turn = {
        "max_assistant_turns": 5,
        "max_user_turns": 6,
        "max_parallel_calls": 2,
        "max_tool_response_length": 100,
        "tool_response_truncate_side": "left",
        "tool_config_path": str(ROOT / "tool_configs" / "calculator.yaml"),
        "format": "hermes",
        "tokenization_sanity_check_mode": "disable",
    }
    ours = {
        "turn_length": 30,
        "max_tool_calls": 4,
        "max_malformed_turns": 3,
        "observation_length": 50,
        "turns_reminder": True,
        "request_timeout_s": 7.5,
    }
    rollout = {"prompt_length": 600, "response_length": 400, "multi_turn": multi_turn, "custom": {"multiturn": ours}}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    made = build_runner(config, LoadedModel(AutoTokenizer.from_pretrained(MODEL), "qwen2"), ScriptedEngine([]))
    assert made.conversation._limits == Limits(
        prompt_length=600,
        response_length=400,
        turn_length=30,
        max_assistant_turns=5,
        max_user_turns=6,
        max_parallel_calls=2,
        max_tool_calls=4,
        max_malformed_turns=3,
        observation_length=50,
        max_tool_response_length=100,
        tool_response_truncate_side="left",
        turns_reminder=True,
        wall_clock_s=7.5,
    )


async def test_no_receipts_are_kept_of_a_conversation_that_raises() -> None:
    from transformers import AutoTokenizer

    from verl_multiturn import ToolContractError

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    call = '<tool_call>\n{"name": "echo", "arguments": {"text": "hi"}}\n</tool_call><|im_end|>'
    made = replace(runner(Versions([tokenizer.encode(call)])), tools={"echo": EchoTool({"returns": 42})})
    request = await made.request({"raw_prompt": [{"role": "user", "content": "Q"}]}, {}, "r1")
    with pytest.raises(ToolContractError, match="got 42"):
        await made.run(request)
    assert made.engine.take("r1") == []


def test_sampling_parameters_stop_where_the_format_does() -> None:
    from tests.support.families import family

    gemma = family("gemma4")
    made = runner(Versions([]), "gemma4", gemma.tokenizer, gemma.model_type or "")
    call_id = gemma.tokenizer.convert_tokens_to_ids("<tool_call|>")
    sampling = made.sampling({"temperature": 1.0, "logprobs": True, "stop_token_ids": [7]})
    assert sampling["temperature"] == 1.0
    assert {7, call_id, gemma.tokenizer.eos_token_id} <= set(sampling["stop_token_ids"])
    end = runner(Versions([])).sampling({"logprobs": True})
    assert end == {"stop_token_ids": [2]}  # <|im_end|>, which SGLang does not know without a tokenizer


def test_a_builder_that_rewrites_what_was_sampled_is_refused() -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.chat.codec import ChatCodec

    class Rewrites:
        def merge_context_tokens(self, before: Any, after: Any, ids: list[int], tools: Any = None) -> Any:
            return SimpleNamespace(token_ids=[*ids[:-2], 9, 9, 9], inserted_token_ids=[], removed_prefix_token_count=2)

    with pytest.raises(ConfigError, match="rewrites sampled tokens"):
        ChatCodec(Rewrites()).observation([], [{"role": "tool", "content": "x"}], [1, 2, 3, 4], [])  # type: ignore[arg-type]


def test_strippable_differences_are_ignored_when_asked() -> None:
    from transformers import AutoTokenizer

    from verl_multiturn.chat.rendering_check import RenderingDifference
    from verl_multiturn.verl_bridge.model.chat_setup import make_chat

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "a b"}]
    for ignored, found in ((set(), [RenderingDifference.WHITESPACE]), ({RenderingDifference.WHITESPACE}, [])):
        chat = make_chat(tokenizer, "qwen2", ignored=ignored)
        prompt = chat.codec.initial(messages[:1], [])
        said = tokenizer.encode("a  b<|im_end|>")
        ids = [*prompt, *said]
        sampled = [False] * len(prompt) + [True] * len(said)
        assert chat.check.differences(messages, [], ids, sampled) == found


@pytest.mark.parametrize(
    ("sanity_check", "found"), [("strict", ["whitespace"]), ("ignore_strippable", []), ("disable", [])]
)
async def test_a_conversation_is_compared_as_the_configuration_says(sanity_check: str, found: list[str]) -> None:
    from transformers import AutoTokenizer

    from verl_multiturn.verl_bridge.loops.output import to_outputs

    said = AutoTokenizer.from_pretrained(MODEL).encode("\nok\n<|im_end|>")
    made = runner(Versions([said]), sanity_check=sanity_check)
    request = await made.request({"raw_prompt": [{"role": "user", "content": "Q"}]}, {}, "r1")
    outcome, _ = await made.run(request)
    assert to_outputs(outcome, made.output_settings, step=9)[0].extra_fields["rendering_differences"] == found


async def test_all_requests_of_a_worker_share_one_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    from tests.support.rollout_config import make_config
    from verl_multiturn.verl_bridge.loops import agent_loop

    class Client:
        async def generate(self, **kwargs: Any) -> Any:
            return answer([5, 2], [-1.0, -2.0], global_steps=3)

    closed: list[Any] = []
    monkeypatch.setattr(agent_loop, "close_at_end", closed.append)
    monkeypatch.setattr(agent_loop, "_runners", {})
    given, tokenizer = SimpleNamespace(config=make_config(50)), AutoTokenizer.from_pretrained(MODEL)
    calculator = str(ROOT / "tool_configs" / "calculator.yaml")
    OmegaConf.update(given.config, "actor_rollout_ref.rollout.multi_turn.tool_config_path", calculator)
    client, other = Client(), Client()
    loops = [agent_loop.MultiTurnAgentLoop(given, each, tokenizer, "qwen2") for each in (client, client, other)]
    assert loops[0]._runner is loops[1]._runner is not loops[2]._runner
    assert [[tool.name for tool in tools] for tools in closed] == [["calculator"], ["calculator"]]
    output = await loops[1].run({"temperature": 1.0}, raw_prompt=[{"role": "user", "content": "1+1"}])
    assert (output.response_ids, output.versions) == ([5, 2], [3, 3])
