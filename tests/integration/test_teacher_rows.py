"""Questions to a teacher: about each row, some at once, again after an outage; no wrong answer is stored."""

import asyncio
import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import RayActorError

from tests.conftest import ROOT, until
from tests.idle_loop import skip_waits
from verl_multiturn.calls.outages.process import Outages
from verl_multiturn.certificate.receipts import Receipts, teacher_digest
from verl_multiturn.config import OutageSettings
from verl_multiturn.errors import ConfigError, OutageError, RewardContractError, TeacherContractError

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


class Teacher:
    """Asks as verl's worker does: the answer is right, but for the changes of `wrong`; or it raises `error`."""

    def __init__(self, width: int | None = None) -> None:
        self.width = width
        self.error: BaseException | None = None
        self.wrong: dict[str, Any] = {}
        self.asked: list[list[int]] = []
        self.running = self.most = 0

    async def __call__(self, output: Any) -> None:
        tokens = [*output.prompt_ids, *output.response_ids]
        self.asked.append(tokens)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
        finally:
            self.running -= 1
        if self.error is not None:
            raise self.error
        ids = torch.tensor([*tokens[1:], 0], dtype=torch.int32).reshape(-1, 1) + torch.arange(self.width or 1)
        logprobs = torch.full(ids.shape, -4.0)
        logprobs[-1] = 0.0
        output.extra_fields |= {"teacher_ids": ids, "teacher_logprobs": logprobs, **self.wrong}


def row(*tokens: int, prompt: int = 2, receipts: bytes = b"", request_id: str = "r") -> Any:
    return SimpleNamespace(
        prompt_ids=list(tokens[:prompt]), response_ids=list(tokens[prompt:]), extra_fields={}, receipts=receipts,
        stats={"request_id": request_id},
    )  # fmt: skip


def questions(width: int | None = None, at_once: int = 9, **outage: Any) -> Any:
    from verl_multiturn.verl_bridge.loops.teacher import TeacherRows

    return TeacherRows(Outages(OutageSettings(**outage)), at_once, width, 100)


async def test_a_validation_asks_no_teacher() -> None:
    output, teacher = row(1, 2, 3), Teacher()
    await questions().ask([output], teacher, validate=True)
    assert (teacher.asked, output.extra_fields) == ([], {})


async def test_each_row_is_asked_about_by_itself_and_its_receipts_know_the_answer() -> None:
    receipts = Receipts("r", []).to_bytes()
    rows, teacher = [row(1, 2, 3, receipts=receipts), row(1, 2, 3, 4, 5, receipts=receipts), row(1, 2)], Teacher()
    await questions().ask(rows, teacher)
    assert sorted(teacher.asked) == [[1, 2], [1, 2, 3], [1, 2, 3, 4, 5]]
    assert [output.extra_fields["teacher_ids"].flatten().tolist() for output in rows] == [
        [2, 3, 0], [2, 3, 4, 5, 0], [2, 0],
    ]  # fmt: skip
    for output, tokens in zip(rows[:2], ([1, 2, 3], [1, 2, 3, 4, 5]), strict=True):
        columns = [output.extra_fields[name].numpy() for name in ("teacher_ids", "teacher_logprobs")]
        assert Receipts.from_bytes(output.receipts).teacher == teacher_digest(np.array(tokens), *columns)
    assert rows[2].receipts == b"", "of a row that is not verified"


NAN = torch.tensor([[-1.0], [torch.nan], [0.0]])


@pytest.mark.parametrize(
    ("width", "wrong", "said"),
    [
        (None, {"teacher_ids": torch.tensor([[2], [9], [0]])}, "token 1 of 3 is 9, the row's next token is 3"),
        (None, {"teacher_ids": torch.tensor([[2], [3]])}, r"teacher_ids is \(2, 1\), expected \(3, 1\)"),
        (None, {"teacher_logprobs": torch.zeros(4, 1)}, r"teacher_logprobs is \(4, 1\), expected \(3, 1\)"),
        (None, {"teacher_logprobs": None}, r"teacher_logprobs is NoneType, expected \(3, 1\)"),
        (None, {"teacher_logprobs": NAN}, r"at token 1 of 3 is \[nan\], expected log-probs"),
        (None, {"teacher_logprobs": torch.tensor([[-torch.inf], [-1.0], [0.0]])}, r"token 0 of 3 is \[-inf\]"),
        (None, {"teacher_logprobs": torch.tensor([[-1.0], [1.0], [0.0]])}, r"token 1 of 3 is \[1.0\]"),
        (2, {"teacher_ids": torch.tensor([[2, -1], [3, 4], [0, 0]])}, "has -1, expected ids from 0 to 99"),
        (2, {"teacher_ids": torch.tensor([[2, 100], [3, 4], [0, 0]])}, "has 100, expected ids from 0 to 99"),
        (
            2,
            {"teacher_ids": torch.tensor([[2, 4], [7, 7], [0, 0]])},
            r"token 1 of 3 is \[7, 7\], expected each id",
        ),
        (None, {"teacher_logprobs": torch.tensor([[-1.0], [-1e30], [0.0]])}, r"token 1 of 3 is \[-1\.0\d*e\+30\]"),
        (2, {"teacher_logprobs": torch.full((3, 2), -0.1)}, r"token 0 of 3 is \[-0\.1\d*, -0\.1\d*\]"),
        (2, {"teacher_logprobs": torch.full((3, 1), -4.0)}, r"teacher_logprobs is \(3, 1\), expected \(3, 2\)"),
    ],
)
async def test_an_answer_that_is_none_ends_the_run(width: int | None, wrong: dict[str, Any], said: str) -> None:
    teacher = Teacher(width)
    await questions(width).ask([row(1, 2, 3)], teacher)
    teacher.wrong = wrong
    with pytest.raises(TeacherContractError, match=f"^distillation: .*{said}.*; give it the vocabulary") as raised:
        await questions(width).ask([row(1, 2, 3)], teacher)
    assert isinstance(raised.value, RewardContractError), "which the trainer ends by"


@pytest.mark.parametrize("error", [AssertionError(), ValueError("no teacher for 'sums'"), KeyError("prompt_ids")])
async def test_what_verls_client_checks_is_asked_again_and_then_ends_the_run_by_name(error: Exception) -> None:
    skip_waits()
    teacher = Teacher()
    teacher.error = error
    with pytest.raises(TeacherContractError, match=f"it was not given: .*{type(error).__name__}"):
        await questions().ask([row(1, 2, 3)], teacher)
    assert len(teacher.asked) == 4


async def test_an_answer_that_a_server_cut_off_is_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    skip_waits()
    teacher, output = Teacher(), row(1, 2, 3)

    async def ask(output: Any) -> None:
        teacher.error = None if teacher.asked else AssertionError("length (1) does not match")
        await teacher(output)

    await questions().ask([output], ask)
    assert (len(teacher.asked), "teacher_logprobs" in output.extra_fields) == (2, True)
    assert "cannot be read, and is requested again: " in caplog.text


@pytest.mark.parametrize("mode", ["pause", "mask"])
async def test_a_question_has_one_time_limit_for_all_its_tries(mode: Any) -> None:
    skip_waits()
    clock = asyncio.get_running_loop().time
    tries: list[float] = []

    async def ask(output: Any) -> None:
        tries.append(clock())
        await asyncio.sleep(6)
        if len(tries) == 1:
            raise ConnectionResetError
        await asyncio.Event().wait()

    with pytest.raises(OutageError, match="the teacher has not answered for 10 s"):
        await questions(mode=mode, stop_s=10.0).ask([row(1, 2, 3)], ask)
    assert (len(tries), round(clock() - tries[1])) == (2, 4)


async def test_another_error_is_raised_as_it_is() -> None:
    teacher = Teacher()
    teacher.error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        await questions().ask([row(1, 2, 3)], teacher)


@pytest.mark.parametrize("mode", ["pause", "mask"])
@pytest.mark.parametrize(
    "error",
    [RayActorError(), RuntimeError("No available servers in load balancer"), TimeoutError(), ConnectionResetError()],
)
async def test_a_server_that_is_away_is_asked_again_about_the_rows_without_an_answer(error: Any, mode: Any) -> None:
    skip_waits()
    teacher = Teacher()
    rows = [row(1, 2, 3), row(1, 2, 4)]

    tries: list[int] = []

    async def ask(output: Any) -> None:
        tries.append(rows.index(output))
        if tries[-1] == 1 and len(tries) < 5:
            raise error
        await teacher(output)

    await questions(mode=mode).ask(rows, ask)
    assert tries == [0, 1, 1, 1, 1]
    assert all("teacher_logprobs" in output.extra_fields for output in rows)


async def test_a_conversation_fails_whose_teacher_stays_away_and_has_no_column() -> None:
    skip_waits()
    teacher, output = Teacher(), row(1, 2, 3)
    teacher.error = RayActorError()
    with pytest.raises(OutageError, match=r"^distillation: the teacher is not there"):
        await questions(mode="mask").ask([output], teacher)
    assert len(teacher.asked) == 4
    assert output.extra_fields == {}


async def test_conversations_wait_for_the_end_of_an_outage() -> None:
    skip_waits()
    teacher, asking = Teacher(), questions()
    teacher.error = RayActorError()
    waiting = [asyncio.create_task(asking.ask([row(1, 2, n, request_id=str(n))], teacher)) for n in range(12)]
    await until(lambda: asking._watch.is_open)
    teacher.error = None
    await asyncio.gather(*waiting)
    assert not any(task.exception() for task in waiting)


async def test_a_wait_that_is_too_long_is_an_outage_by_name() -> None:
    teacher, asking = Teacher(), questions(stop_s=0.2)
    teacher.error = RayActorError()
    ended = await asyncio.gather(
        *(asking.ask([row(1, 2, n, request_id=str(n))], teacher) for n in range(12)), return_exceptions=True
    )
    assert {type(error) for error in ended} == {OutageError}
    assert any("teacher: its outage has lasted for more than 0.2 s" in str(error) for error in ended)


async def test_a_worker_has_no_more_questions_under_way_than_its_share() -> None:
    teacher, asking = Teacher(), questions(at_once=3)
    await asyncio.gather(*(asking.ask([row(1, 2, n), row(1, 2, n, 7), row(1, 2, n, 8)], teacher) for n in range(5)))
    assert (len(teacher.asked), teacher.most) == (15, 3)


async def test_a_cancelled_conversation_leaves_no_question_behind() -> None:
    held, asking = Teacher(), questions(at_once=2)

    async def ask(output: Any) -> None:
        held.running += 1
        try:
            await asyncio.Event().wait()
        finally:
            held.running -= 1

    task = asyncio.create_task(asking.ask([row(1, 2, 3), row(1, 2, 4), row(1, 2, 5)], ask))
    await until(lambda: held.running == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: held.running == 0)
    await asking.ask([row(1, 2, 3), row(1, 2, 4)], Teacher())


@pytest.mark.parametrize(
    ("engine", "left_out"), [("sglang", {"detokenize"}), ("sglang_async", {"detokenize"}), ("vllm", set())]
)
async def test_a_teacher_gets_the_parameters_that_its_engine_takes(engine: str, left_out: set[str]) -> None:
    from omegaconf import OmegaConf
    from verl.experimental.teacher_loop.teacher_manager import _get_teacher_sampling_params

    from verl_multiturn.verl_bridge.loops.teacher import teacher_rows

    class Client:
        async def generate(self, *, sampling_params: dict[str, Any], **given: Any) -> Any:
            return sampling_params, given

    teacher = SimpleNamespace(
        num_replicas=1, inference=SimpleNamespace(max_num_seqs=1, name=engine, temperature=1.0), model_path=MODEL
    )  # fmt: skip
    loss = SimpleNamespace(topk=5, loss_settings=SimpleNamespace(use_topk=True))
    manager = SimpleNamespace(
        teacher_model_configs={"one": teacher}, teacher_client={"one": Client()}, distillation_loss_config=loss,
    )  # fmt: skip
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"agent": {"num_workers": 1}}}})
    teacher_rows(manager, config, Outages(), 100)
    verls = _get_teacher_sampling_params(teacher, loss)  # type: ignore[arg-type]
    sent, given = await manager.teacher_client["one"].generate(
        request_id="r", prompt_ids=[1], sampling_params=verls, image_data=None
    )
    assert sent == {name: value for name, value in verls.items() if name not in left_out}
    assert given == {"request_id": "r", "prompt_ids": [1], "image_data": None}
    if engine != "vllm":
        assert manager.teacher_client["one"]._words == 576
        from sglang.srt.sampling.sampling_params import SamplingParams

        # verl's server translates these two.
        SamplingParams(**{name: value for name, value in sent.items() if name not in ("max_tokens", "prompt_logprobs")})


class OfSglang:
    """verl's client of a teacher on SGLang 0.5.12, whose vocabulary has 100 ids: it writes 0 for the last one."""

    asked = 0

    async def generate(self, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> Any:
        self.asked += 1
        width = sampling_params["prompt_logprobs"]
        ids = [[token if token < 99 else 0, *range(50, 49 + width)] for token in prompt_ids[1:]]
        logprobs = [[-4.0] * max(1, width) for _ in ids]
        nothing = [0] * max(1, width)
        return SimpleNamespace(extra_fields={"prompt_ids": [*ids, nothing], "prompt_logprobs": [*logprobs, nothing]})


async def through(client: Any, output: Any, topk: int = 0, **media: Any) -> None:
    """Ask as verl's worker does."""
    tokens = [*output.prompt_ids, *output.response_ids]
    parameters = {"prompt_logprobs": topk}
    answer = await client.generate(request_id="r", prompt_ids=tokens, sampling_params=parameters, **media)
    output.extra_fields |= {
        "teacher_ids": torch.tensor(answer.extra_fields["prompt_ids"], dtype=torch.int32),
        "teacher_logprobs": torch.tensor(answer.extra_fields["prompt_logprobs"]),
    }


async def test_the_last_id_of_the_vocabulary_of_a_teacher_on_sglang_is_in_its_answer() -> None:
    from verl_multiturn.verl_bridge.loops.teacher import SglangTeacher

    rows = [row(1, 99, 99, 5, 99), row(99, 2, 0)]
    await questions().ask(rows, lambda output: through(SglangTeacher(OfSglang(), 100), output))
    assert [output.extra_fields["teacher_ids"].flatten().tolist() for output in rows] == [
        [99, 99, 5, 99, 0], [2, 0, 0],
    ]  # fmt: skip
    liked = row(1, 99, 7)
    await questions(2).ask([liked], lambda output: through(SglangTeacher(OfSglang(), 100), output, 2))
    assert liked.extra_fields["teacher_ids"].tolist() == [[0, 50], [7, 50], [0, 0]], "its likeliest, not the row's"


async def test_a_token_outside_the_vocabulary_of_a_teacher_on_sglang_is_not_sent_to_it() -> None:
    from verl_multiturn.verl_bridge.loops.teacher import SglangTeacher

    client = OfSglang()
    with pytest.raises(TeacherContractError, match=r"the row has the token 100, and the teacher's are 0 to 99; give"):
        await questions().ask([row(1, 100, 3)], lambda output: through(SglangTeacher(client, 100), output))
    assert client.asked == 0


@pytest.mark.parametrize("media", [{"image_data": ["image"]}, {"video_data": ["video"], "image_data": None}])
async def test_a_row_with_an_image_is_sent_to_a_teacher_on_sglang_where_its_likeliest_ids_count(media: Any) -> None:
    from verl_multiturn.verl_bridge.loops.teacher import SglangTeacher

    client = OfSglang()
    teacher = SglangTeacher(client, None)
    with pytest.raises(TeacherContractError, match=r"SGLang 0\.5\.12 writes 0 for each id; set .*forward_kl_topk, or"):
        await questions().ask([row(1, 5, 3)], lambda output: through(teacher, output, **media))
    assert client.asked == 0
    await questions().ask([row(1, 5, 3)], lambda output: through(teacher, output, image_data=None, video_data=[]))
    await questions(2).ask([row(1, 5, 3)], lambda output: through(teacher, output, 2, **media))
    assert client.asked == 2


def test_a_worker_has_its_share_of_the_servers() -> None:
    from omegaconf import OmegaConf

    from verl_multiturn.verl_bridge.loops.teacher import teacher_rows

    def teacher(seats: int, replicas: int) -> Any:
        return SimpleNamespace(num_replicas=replicas, inference=SimpleNamespace(max_num_seqs=seats, name="vllm"))

    def made(workers: int, use_topk: bool, *teachers: Any) -> Any:
        loss = SimpleNamespace(topk=5, loss_settings=SimpleNamespace(use_topk=use_topk))
        manager = SimpleNamespace(
            teacher_model_configs=dict(enumerate(teachers)), distillation_loss_config=loss,
        )  # fmt: skip
        config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"agent": {"num_workers": workers}}}})
        return teacher_rows(manager, config, Outages(), 100)

    assert (made(8, False, teacher(64, 2), teacher(10, 1))._slots._value, 138 / 8) == (18, 17.25)
    assert made(8, True, teacher(1, 1))._slots._value == 1
    assert (made(1, True, teacher(4, 1))._width, made(1, False, teacher(4, 1))._width) == (5, None)


def test_a_worker_knows_the_vocabulary_of_the_model_that_it_trains() -> None:
    from transformers import Qwen2Config

    from tests.support.teachers import teaching, worker_of

    worker = worker_of(teaching(), None)
    worker.model_config = SimpleNamespace(hf_config=Qwen2Config(vocab_size=77))
    assert worker._teacher._words == 77


MODEL = ROOT / "recipes" / "quickstart" / "model"


def teacher(folder: Path, **vocabulary: int) -> str:
    """Write the quickstart's model with other ids of some tokens."""
    shutil.copytree(MODEL, folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"] |= vocabulary
    file.write_text(json.dumps(tokenizer))
    return str(folder)


@pytest.mark.parametrize(
    ("vocabulary", "refused"),
    [
        ({}, ""),
        ({"7": 600}, "its tokenizer has other ids for 1 of the policy's tokens ('7' is one)"),
        ({"7": 26, "8": 25}, "its tokenizer has other ids for 2 of the policy's tokens ('7' is one)"),
    ],
    ids=["same", "moved", "swapped"],
)
def test_a_teacher_with_other_tokens_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], vocabulary: dict[str, int], refused: str
) -> None:
    from transformers import AutoTokenizer

    from tests.integration.test_refusals import composed
    from verl_multiturn.verl_bridge.startup.refusals.rows import ESTIMATOR
    from verl_multiturn.verl_bridge.startup.table import Section, check
    from verl_multiturn.verl_bridge.startup.view import RunView

    path = teacher(tmp_path / "teacher", **vocabulary)
    more = teacher(tmp_path / "more")
    tokenizer = AutoTokenizer.from_pretrained(more)
    tokenizer.add_tokens(["seven"])
    tokenizer.save_pretrained(more)
    section = "distillation.teacher_models.teacher_model.model_path"
    config = composed(**{"distillation.enabled": "True", section: path})
    with pytest.raises(ConfigError, match=re.escape(refused)) if refused else nullcontext():
        check(RunView(config), [Section("Estimators and filters", ESTIMATOR)])
    assert capsys.readouterr().err == ""
    check(RunView(config, is_early=True), [Section("Estimators and filters", ESTIMATOR)])
    for other in ("somewhere/else", more):
        config.distillation.teacher_models.teacher_model.model_path = other
        check(RunView(config), [Section("Estimators and filters", ESTIMATOR)])
    assert capsys.readouterr().err == ""
    config.actor_rollout_ref.model.path, config.distillation.teacher_models.teacher_model.model_path = more, str(MODEL)
    check(RunView(config), [Section("Estimators and filters", ESTIMATOR)])
    assert "does not have 1 of the policy's tokens ('seven' is one) at their ids" in capsys.readouterr().err


@pytest.mark.parametrize("is_named", [False, True])
def test_a_reserved_token_of_another_name_is_no_other_tokenizer(tmp_path: Path, is_named: bool) -> None:
    from transformers import AutoTokenizer

    from tests.integration.test_refusals import composed
    from verl_multiturn.verl_bridge.model.loading import differing_tokens

    for name, token in (("policy", "<|reserved|>"), ("other", "<|python_tag|>")):
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        tokenizer.add_tokens([token], special_tokens=True)
        shutil.copytree(MODEL, tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    model = composed(**{"actor_rollout_ref.model.path": str(tmp_path / "policy")}).actor_rollout_ref.model
    model.custom_chat_template = "{{ messages }}<|reserved|>" if is_named else None
    found = differing_tokens(model, str(tmp_path / "other"))
    assert found == ((["<|reserved|>"], []) if is_named else ([], ["<|reserved|>"]))


BY_ROLE = "{% for said in messages %}{{ '<|' + said.role + '|>' + said.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("token", "is_special", "template"), [("seven", False, None), ("<|user|>", True, BY_ROLE)], ids=["word", "by_role"]
)
def test_a_token_that_conversations_have_makes_another_tokenizer(
    tmp_path: Path, token: str, is_special: bool, template: str | None
) -> None:
    from transformers import AutoTokenizer

    from tests.integration.test_refusals import composed
    from verl_multiturn.verl_bridge.model.loading import differing_tokens

    for name, added in (("policy", token), ("other", "another")):
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        tokenizer.add_tokens([added], special_tokens=is_special)
        shutil.copytree(MODEL, tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    model = composed(**{"actor_rollout_ref.model.path": str(tmp_path / "policy")}).actor_rollout_ref.model
    model.custom_chat_template = template
    assert differing_tokens(model, str(tmp_path / "other")) == ([token], [])


def test_code_in_the_folder_of_a_teacher_is_not_run(tmp_path: Path) -> None:
    from tests.integration.test_refusals import composed
    from verl_multiturn.verl_bridge.model.loading import differing_tokens

    folder, trace = Path(teacher(tmp_path / "teacher", **{"7": 600})), tmp_path / "trace"
    (folder / "config.json").unlink()  # whose type would name a class of transformers' own
    (folder / "own.py").write_text(f"open({str(trace)!r}, 'w').close()\nclass Own: pass\n")
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {
        "tokenizer_class": "Own",
        "auto_map": {"AutoTokenizer": [None, "own.Own"]},
    }
    file.write_text(json.dumps(settings))
    model = composed(**{"actor_rollout_ref.model.trust_remote_code": "True"}).actor_rollout_ref.model
    differing_tokens(model, str(folder))
    assert not trace.exists()


def test_a_teacher_that_verl_drops_is_not_looked_at(tmp_path: Path) -> None:
    from tests.integration.test_refusals import composed
    from verl_multiturn.verl_bridge.startup.view import RunView

    models = "distillation.teacher_models"
    changes = {"distillation.enabled": "True", f"{models}.teacher_model.model_path": "/dropped"}
    assert RunView(composed(**changes)).teachers == {"teacher_model": "/dropped"}
    changes[f"+{models}.second"] = "{key: k, model_path: /second}"
    assert RunView(composed(**changes)).teachers == {"second": "/second"}


@pytest.mark.parametrize(
    ("name", "inference", "refused"),
    [
        ("second", "{name: sglang}", True),
        ("second", "{name: sglang, load_format: dummy}", True),
        ("second", "{name: sglang, load_format: auto}", False),
        ("teacher_model", "{load_format: dummy_hf}", True),
        ("teacher_model", "{}", False),
    ],
)
def test_a_teacher_with_random_weights_is_refused(name: str, inference: str, refused: bool) -> None:
    from tests.integration.test_refusals import composed
    from verl_multiturn.verl_bridge.startup.refusals.rows import ESTIMATOR
    from verl_multiturn.verl_bridge.startup.table import Section, check
    from verl_multiturn.verl_bridge.startup.view import RunView

    models = "distillation.teacher_models"
    added = f"{models}.teacher_model" if name == "teacher_model" else f"++{models}.{name}"
    config = composed(**{"distillation.enabled": "True", f"{added}.model_path": "a/b", f"{added}.inference": inference})
    said = f"{models}.{name}.inference.load_format='dummy.*': verl 0.9.1 starts this teacher with random weights"
    with pytest.raises(ConfigError, match=said) if refused else nullcontext():
        check(RunView(config, is_early=True), [Section("Estimators and filters", ESTIMATOR)])


@pytest.mark.parametrize(
    ("keys", "refused"),
    [(["a/b", "a_b"], True), (["k", "k"], True), (["a/b", "a.b"], False), (["x", "y", "a/b/c", "a_b_c"], True)],
)
def test_teachers_whose_servers_would_have_one_name_are_refused(keys: list[str], refused: bool) -> None:
    from tests.integration.test_refusals import composed
    from verl_multiturn.verl_bridge.startup.refusals.rows import ESTIMATOR
    from verl_multiturn.verl_bridge.startup.table import Section, check
    from verl_multiturn.verl_bridge.startup.view import RunView

    models, inference = "distillation.teacher_models", "inference: {name: sglang, load_format: auto}"
    given = {f"+{models}.t{i}": f"{{key: {key}, model_path: m, {inference}}}" for i, key in enumerate(keys)}
    run = RunView(composed(**{"distillation.enabled": "True", **given}), is_early=True)
    first, second = len(keys) - 2, len(keys) - 1
    said = rf"\.t{first}\.key='{keys[-2]}' with .*\.t{second}\.key='{keys[-1]}': verl names .* rows' data_source$"
    with pytest.raises(ConfigError, match=said) if refused else nullcontext():
        check(run, [Section("Estimators and filters", ESTIMATOR)])


@pytest.mark.parametrize(("own", "longest", "most"), [("null", 2047, 0), ("null", 2048, 2048), ("1000", 1000, 1000)])
def test_a_teacher_that_cannot_read_the_longest_row_is_named(
    capsys: pytest.CaptureFixture[str], own: str, longest: int, most: int
) -> None:
    from tests.integration.test_refusals import composed
    from verl_multiturn.verl_bridge.startup.refusals.rows import ESTIMATOR
    from verl_multiturn.verl_bridge.startup.table import Section, check
    from verl_multiturn.verl_bridge.startup.view import RunView

    rollout, added = "actor_rollout_ref.rollout", "distillation.teacher_models.teacher_model"
    lengths = {f"{rollout}.prompt_length": "500", f"{rollout}.response_length": str(longest - 500)}
    given = {f"{added}.model_path": str(MODEL), f"{added}.inference.max_model_len": own}
    config = composed(**{"distillation.enabled": "True", **given, **lengths})
    config.actor_rollout_ref.model.path = str(MODEL)
    check(RunView(config), [Section("Estimators and filters", ESTIMATOR)])
    said = f"it takes one token less than {most}, and a row may have {longest} " if most else ""
    assert said in (told := capsys.readouterr().err)
    assert bool(told) is bool(most)
