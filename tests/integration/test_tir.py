"""Text mode and void turns within verl: requests to the engine, batches of the trainer, and refused settings."""

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.conftest import ROOT
from tests.support.warm_python import run_warm
from tests.text_mode import ANSWER, BLOCK, CALL, CodeTool

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

MODEL = ROOT / "recipes" / "quickstart" / "model"
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


def make_runner(tokenizer: Any, turns: list[str], custom: dict[str, Any] | None = None, **rollout: Any) -> Any:
    from verl_multiturn import ScriptedEngine
    from verl_multiturn.verl_bridge.loops.runner import build_runner
    from verl_multiturn.verl_bridge.model.loading import LoadedModel

    multi_turn = {
        "max_assistant_turns": None,
        "max_user_turns": None,
        "max_parallel_calls": 1,
        "max_tool_response_length": 100,
        "tool_response_truncate_side": "middle",
        "tool_config_path": None,
        "format": rollout.pop("tool_format", "tir"),
    }
    config = {"prompt_length": 200, "response_length": 400, "multi_turn": multi_turn, **rollout}
    config["custom"] = {"multiturn": custom or {}}
    engine = ScriptedEngine([tokenizer.encode(turn) for turn in turns], version=3)
    whole = OmegaConf.create({"actor_rollout_ref": {"rollout": config}, "data": {}})
    runner = build_runner(whole, LoadedModel(tokenizer, "qwen2"), engine)
    runner.tools["run"] = CodeTool()
    return runner


async def roll(runner: Any, session: int = 0, uid: str = "u") -> Any:
    """Run a conversation, and return the output that our agent loop gives verl."""
    from verl_multiturn.verl_bridge.loops.agent_loop import MultiTurnAgentLoop

    loop = object.__new__(MultiTurnAgentLoop)
    loop._runner = runner
    row = {"raw_prompt": [{"role": "user", "content": "6*7?"}], "uid": uid, "session_id": session, "global_steps": 4}
    return await loop.run({"temperature": 1.0, "logprobs": True}, **row)


async def test_what_verl_gets(tokenizer: Any) -> None:
    # The second turn goes on beyond the marker.
    turns = [CALL, "```output\n1\n```\nnever", f"{ANSWER}<|im_end|>"]
    runner = make_runner(tokenizer, turns)
    output = await roll(runner)
    (first, second, last) = (tokenizer.encode(text) for text in (CALL, "```output", f"{ANSWER}<|im_end|>"))
    ran = tokenizer.encode("\n42\n```\n")
    told = tokenizer.encode("\nError: there is no python block since the last output block; nothing was run\n```\n")
    assert output.response_ids == first + ran + second + told + last
    expected = [(1, first), (0, ran), (1, second), (0, told), (1, last)]
    assert output.response_mask == [trained for trained, ids in expected for _ in ids]
    prompt = tokenizer.decode(output.prompt_ids)
    assert "run" not in prompt
    assert prompt.endswith("<|im_start|>user\n6*7?<|im_end|>\n<|im_start|>assistant\n")
    fields = output.extra_fields
    assert fields["assistant_texts"] == [CALL, "```output", ANSWER]
    assert fields["assistant_calls"] == [
        [{"name": "run", "arguments": '{"code": "print(6*7)"}'}],
        [{"name": "", "arguments": "```output"}],
        [],
    ]
    assert fields["call_statuses"] == ["ok", "malformed"]
    assert (fields["stop_reason"], fields["rendering_differences"], fields["void"]) == ("finished", [], False)


async def test_calls_of_other_formats(tokenizer: Any) -> None:
    call = '<tool_call>{"name": "run", "arguments": {"code": "1"}}</tool_call>'
    turns = [f"{call}<tool_call>oops</tool_call><|im_end|>", "1<|im_end|>"]
    output = await roll(make_runner(tokenizer, turns, tool_format="hermes"))
    assert output.extra_fields["assistant_calls"] == [
        [{"name": "run", "arguments": '{"code": "1"}'}, {"name": "", "arguments": "<tool_call>oops</tool_call>"}],
        [],
    ]


def test_the_engine_is_asked_to_stop_at_the_marker(tokenizer: Any) -> None:
    asked = make_runner(tokenizer, []).sampling({"temperature": 0.5, "logprobs": True})
    assert asked == {"temperature": 0.5, "stop_token_ids": [2], "stop_regex": [r"(?:\A|\n)```output"]}
    assert "stop_regex" not in make_runner(tokenizer, [], tool_format="hermes").sampling({})


def test_an_engine_without_a_tokenizer_is_refused(tokenizer: Any) -> None:
    from verl_multiturn import ConfigError

    with pytest.raises(ConfigError, match=r"skip_tokenizer_init=True.*output marker.*set it to False"):
        make_runner(tokenizer, [], skip_tokenizer_init=True)
    make_runner(tokenizer, [], skip_tokenizer_init=True, tool_format="hermes")


def the_record(runner: Any, folder: Path) -> dict[str, Any]:
    """Return the record of the only conversation."""
    from verl_multiturn.records.read.records import read_records

    runner.records.writer.close()
    (record,) = read_records(folder)
    return record


VOID = {"void_turn_pattern": r"\\boxed"}


@pytest.mark.parametrize(
    ("turns", "custom", "void"),
    [
        ([CALL, f"{ANSWER}<|im_end|>"], VOID, False),
        ([CALL, "Well.<|im_end|>"], VOID, True),
        ([CALL, "Well.<|im_end|>"], {}, False),
        ([], VOID, False),
    ],
    ids=["whole", "void", "off", "invalid"],
)
async def test_a_row_says_that_a_turn_is_void(
    tokenizer: Any, tmp_path: Path, turns: list[str], custom: dict[str, Any], void: bool
) -> None:
    from verl_multiturn.certificate.receipts import Receipts

    runner = make_runner(tokenizer, turns, {**custom, "record_dir": str(tmp_path)})
    output = await roll(runner)
    assert (output.extra_fields["void"], output.stats.get("void")) == (void, void if custom else None)
    # The trainer decides on it; validation does nothing.
    assert any(output.response_mask) == bool(turns)
    fields = output.as_dict()
    assert Receipts.from_bytes(fields["rollout_receipts"].numpy().tobytes()).void is void
    assert the_record(runner, tmp_path)["void"] is void


@pytest.mark.parametrize("boxes", [True, False])
async def test_an_answer_ends_with_its_box_where_the_run_says_so(tokenizer: Any, tmp_path: Path, boxes: bool) -> None:
    """The engine goes on; its tokens behind the box are in no row, no receipt and no record."""
    from verl_multiturn.certificate.receipts import Receipts
    from verl_multiturn.records.verify.record import verify_record

    long = f"{ANSWER} And more.<|im_end|>"
    custom = {"tir": {"stop": ["boxed"]}} if boxes else {}
    runner = make_runner(tokenizer, [CALL, long], {**custom, "record_dir": str(tmp_path)})
    output = await roll(runner)
    said = tokenizer.encode("It is \\boxed{42}" if boxes else long)
    before = tokenizer.encode(f"{CALL}\n42\n```\n")
    assert output.response_ids == before + said
    assert output.response_mask[-len(said) :] == [1] * len(said)
    assert output.extra_fields["stop_reason"] == "finished"
    receipts = Receipts.from_bytes(output.as_dict()["rollout_receipts"].numpy().tobytes())
    assert receipts.generations[-1].ids.tolist() == said
    record = the_record(runner, tmp_path)
    verified = verify_record(record)
    assert verified.violations == []
    assert record["messages"][-1]["content"] == ("It is \\boxed{42}" if boxes else long.removesuffix("<|im_end|>"))


CERTIFICATE = "rollout/certificate/"


class Batch:
    """Rows as the trainer finds them in TransferQueue, and our trainer on top of one that computes no advantages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pattern: str | None) -> None:
        from tests.integration.trainer_rows import WritableStore, make_trainer, put_in_place

        self.store = WritableStore()
        put_in_place(self.store, monkeypatch)
        self.trainer = make_trainer(actor_rollout_ref__rollout__custom__multiturn__void_turn_pattern=pattern)

    async def add(self, tokenizer: Any, *answers: str, uid: str = "u") -> None:
        """Add a conversation for each answer, with a call before the answer."""
        for session, answer in enumerate(answers):
            output = await roll(make_runner(tokenizer, [CALL, f"{answer}<|im_end|>"], VOID), session, uid)
            output.reward_score = 0.5
            self.store.add(uid, session, output)

    def step(self) -> dict[str, Any]:
        from tests.integration.trainer_rows import step

        return step(self.trainer, self.store.batch())

    def masks(self, column: str = "response_mask") -> list[bool]:
        return [bool(row[column].any()) for row in self.store.rows.values()]


async def test_the_trainer_keeps_void_rows_out_of_the_loss(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    batch = Batch(monkeypatch, VOID["void_turn_pattern"])
    await batch.add(tokenizer, ANSWER, "Well.", ANSWER, "No.")
    before = {key: {**row} for key, row in batch.store.rows.items()}
    metrics = batch.step()
    assert (metrics[f"{CERTIFICATE}rows"], metrics[f"{CERTIFICATE}violations"]) == (4, 0)
    assert batch.masks() == batch.masks("loss_mask") == [True, False, True, False]
    for key, row in batch.store.rows.items():
        for name in before[key].keys() - {"advantages"}:
            column = row[name]
            same = column is before[key][name] or torch.equal(column, before[key][name])
            assert same == (name not in ("response_mask", "loss_mask") or key in ("u_0_0", "u_2_0")), (key, name)
        assert row["rm_scores"].sum() == 0.5  # the reward counts in its group
        assert row["response_mask"].shape == before[key]["response_mask"].shape


async def test_without_a_pattern_nothing_is_filtered(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(monkeypatch, None)
    await batch.add(tokenizer, ANSWER, "Well.")
    assert batch.step()[f"{CERTIFICATE}violations"] == 0
    assert batch.masks() == [True, True]


async def test_answers_that_end_with_their_boxes_pass_the_certificate(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, trained = Batch(monkeypatch, None), 0
    for session, answer in enumerate((f"{ANSWER} More.", r"\boxed{\frac{4}{2}} More.", "No box.")):
        output = await roll(
            make_runner(tokenizer, [CALL, f"{answer}<|im_end|>"], {"tir": {"stop": ["boxed"]}}), session
        )
        output.reward_score = 0.5
        batch.store.add("u", session, output)
        trained += sum(output.response_mask)
    metrics = batch.step()
    assert [metrics[f"{CERTIFICATE}{name}"] for name in ("rows", "violations", "tokens")] == [3, 0, trained]


async def test_a_batch_without_void_rows_is_left(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(monkeypatch, VOID["void_turn_pattern"])
    await batch.add(tokenizer, ANSWER, ANSWER)
    put = batch.store.kv_batch_put

    def only_advantages(keys: list[str], partition_id: str, fields: Any) -> Any:
        assert "response_mask" not in fields
        assert "loss_mask" not in fields
        return put(keys, partition_id, fields)

    monkeypatch.setattr(batch.store, "kv_batch_put", only_advantages)
    assert batch.step()[f"{CERTIFICATE}violations"] == 0
    assert batch.masks() == [True, True]


async def test_a_batch_of_void_rows_alone_is_filtered_too(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(monkeypatch, VOID["void_turn_pattern"])
    await batch.add(tokenizer, "Well.", "No.")
    assert batch.step()[f"{CERTIFICATE}violations"] == 0
    assert batch.masks() == batch.masks("loss_mask") == [False, False]


@pytest.mark.parametrize(
    ("key", "column", "trained", "what"),
    [
        ("u_0_0", "response_mask", 0, "mask is 0, by the receipts 1"),
        ("u_0_0", "loss_mask", 0, "loss_mask is 0, by the receipts 1"),
        ("u_1_0", "response_mask", 1, "mask is 1, by the receipts 0"),
        ("u_1_0", "loss_mask", 1, "loss_mask is 1, by the receipts 0"),
    ],
)
async def test_the_certificate_takes_no_other_mask(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, key: str, column: str, trained: int, what: str
) -> None:
    from verl_multiturn import CertificateError

    batch = Batch(monkeypatch, VOID["void_turn_pattern"])
    await batch.add(tokenizer, ANSWER, "Well.")
    put = batch.store.kv_batch_put

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        batch_now = put(*args, **kwargs)
        mask = batch.store.rows[key][column].clone()
        mask[0] = trained
        batch.store.rows[key][column] = mask
        return batch_now

    monkeypatch.setattr(batch.store, "kv_batch_put", spoiled)
    with pytest.raises(CertificateError, match=rf"row {key}\W.* {what}"):
        batch.step()


async def test_a_mask_of_zeros_without_the_filter_is_a_violation(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn import CertificateError

    batch = Batch(monkeypatch, None)
    await batch.add(tokenizer, ANSWER, "Well.")
    row = batch.store.rows["u_1_0"]
    row["response_mask"] = row["loss_mask"] = row["response_mask"] * 0
    with pytest.raises(CertificateError, match=r"row u_1_0.* mask is 0, by the receipts 1"):
        batch.step()


async def test_the_share_of_void_conversations(tokenizer: Any) -> None:
    from verl_multiturn.observe.metrics import aggregate

    turns = [[CALL, f"{ANSWER}<|im_end|>"], ["Well.<|im_end|>"], [f"{BLOCK}<|im_end|>"], []]
    stats = [(await roll(make_runner(tokenizer, each, VOID))).as_dict()["metrics"]["rollout"] for each in turns]
    assert aggregate(stats)["void_share"] == 0.5
    plain = (await roll(make_runner(tokenizer, ["Well.<|im_end|>"]))).as_dict()["metrics"]["rollout"]
    assert "void_share" not in aggregate([plain])


def composed(**changes: str) -> Any:
    from tests.integration import test_refusals

    python = str(ROOT / "tool_configs" / "python.yaml")
    cpus = {"ray_kwargs.ray_init.num_cpus": "64"}
    return test_refusals.composed(
        **{f"{ROLLOUT}.multi_turn.format": "tir", f"{ROLLOUT}.multi_turn.tool_config_path": python, **cpus, **changes}
    )


def test_what_the_start_up_check_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup import configuration

    config = composed()
    assert config.actor_rollout_ref.rollout.skip_tokenizer_init
    configuration.prepare_config(config)
    assert config.actor_rollout_ref.rollout.skip_tokenizer_init is False
    calculator = {f"{ROLLOUT}.multi_turn.tool_config_path": str(ROOT / "tool_configs" / "calculator.yaml")}
    with pytest.raises(ConfigError, match=r"format='tir': none of the tools \['calculator'\] requires a string `code`"):
        configuration.prepare_config(composed(**calculator))
    bad = {f"+{ROLLOUT}.custom.multiturn.void_turn_pattern": r"'\\boxed('"}
    with pytest.raises(ConfigError, match=r"void_turn_pattern: .*no regular expression"):
        configuration.prepare_config(composed(**bad))
    pattern = {f"+{ROLLOUT}.custom.multiturn.void_turn_pattern": "boxed"}
    configuration.prepare_config(composed(**pattern))
    with pytest.raises(ConfigError, match=r"void_turn_pattern='boxed': only verl's own V1 trainers.*use_v1=False"):
        configuration.prepare_config(composed(**pattern, **{"trainer.use_v1": "False"}))
    other = composed(**{f"{ROLLOUT}.multi_turn.format": "hermes"})
    configuration.prepare_config(other)
    assert other.actor_rollout_ref.rollout.skip_tokenizer_init is True


@pytest.fixture
def plain_model(tmp_path: Path) -> str:
    """Copy the quickstart's model, with a template as a base model may have it.

    The template has no tools and no tool role, and another end token.
    """
    import shutil

    shutil.copytree(MODEL, tmp_path / "model")
    text = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}<|endoftext|>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (tmp_path / "model" / "chat_template.jinja").write_text(text)
    return str(tmp_path / "model")


def test_a_template_without_a_place_for_tools(plain_model: str) -> None:
    from verl_multiturn.chat.template_rules import refusals
    from verl_multiturn.verl_bridge.model.chat_setup import examine_model
    from verl_multiturn.verl_bridge.model.loading import load_model
    from verl_multiturn.verl_bridge.startup import configuration

    rules = examine_model(load_model({"path": plain_model}, ""), "tir")
    assert [(rule.name, str(rule.verdict)) for rule in rules] == [
        ("renders a prompt", "kept"),
        ("system message rendered", "kept"),
        ("what is said is shown", "known"),
        ("a turn ends with an end token", "known"),
        ("generation prompt", "kept"),
    ]
    assert refusals(examine_model(load_model({"path": plain_model}, ""), "hermes"))
    configuration.prepare_config(composed(**{"actor_rollout_ref.model.path": plain_model}))


def test_a_model_for_images_is_refused(tokenizer: Any) -> None:
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.model.chat_setup import make_chat

    with pytest.raises(ConfigError, match="format=tir is text alone"):
        make_chat(tokenizer, "qwen2_5_vl", processor=object(), text_mode=True)


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_real_engine_stops_at_the_marker_and_keeps_it(tmp_path: Path) -> None:
    done = run_warm("-m", "tests.integration.tir_engine", str(tmp_path), timeout_s=1700)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    # The marker has more tokens than "```output" by itself, so SGLang's stop strings would have missed it.
    first = ["```python\n", "print(6*7", ")\n```\n", "`", "``", "ou", "tp", "ut"]
    assert result["said"] == [first, ["Done", "<|im_end|>"]]
    assert result["reasons"] == ["stop", "stop"]
    said, answered = result["engine_ids"]
    assert (result["ids"][: len(said)], result["ids"][-len(answered) :]) == (said, answered)
    observed = len(result["ids"]) - len(said) - len(answered)
    assert result["mask"] == [1] * len(said) + [0] * observed + [1] * len(answered)
    assert result["text"] == f"{CALL}\n42\n```\nDone<|im_end|>"
    assert result["stop"] == "finished"
