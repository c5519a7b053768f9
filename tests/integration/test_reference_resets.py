"""Resets of the reference of the KL term: verl's own engines, checkpoints and resumes, and runs that are refused."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integration.test_refusals import composed
from tests.support.warm_python import run_with_stack
from verl_multiturn.config import PATH, ReferenceResetSettings, read_settings
from verl_multiturn.errors import ConfigError
from verl_multiturn.rows.keys import RowKey

# Importing verl's engines warns about optional ones that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

KEY = f"{PATH}.reference_reset"
ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
ROWS = [([5, 6, 7], [8, 9, 10, 11], [1, 1, 1, 1]), ([5, 6], [20, 21, 22], [1, 0, 1])]


def test_one_rule_at_a_time() -> None:
    with pytest.raises(ConfigError, match="every and kl_above are two rules"):
        read_settings({"reference_reset": {"every": 2, "kl_above": 0.1}})
    for wrong in ({"every": 0}, {"kl_above": 0.0}, {"kl_above": math.inf}, {"every": 1.5}, {"often": 1}):
        with pytest.raises(ConfigError, match="reference_reset"):
            read_settings({"reference_reset": wrong})
    assert not read_settings({}).reference_reset.is_on
    assert read_settings({"reference_reset": {"kl_above": 0.1}}).reference_reset.is_on


# verl's engines.


@pytest.fixture(scope="module")
def kit() -> Iterator[Any]:
    from tests.support import training_engine

    yield training_engine
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def model(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = kit.make_model(tmp_path_factory.mktemp("model"))
    return made


class Pair:
    """The engines of an actor and of a reference, in a worker of ours without its other parts."""

    def __init__(self, kit: Any, model: Path, **of_reference: Any) -> None:
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

        from verl_multiturn.verl_bridge.trainer.reference_worker import ReferenceWorker

        self.kit = kit
        self.actor = kit.make_engine(FSDPEngineWithLMHead, model, lr=0.01)
        self.reference = kit.make_engine(FSDPEngineWithLMHead, model, forward_only=True, **of_reference)
        self.worker: Any = object.__new__(ReferenceWorker)
        self.worker._rank, self.worker._world_size = 0, 1
        self.worker.actor, self.worker.ref = SimpleNamespace(engine=self.actor), SimpleNamespace(engine=self.reference)
        self.batch = kit.make_batch(ROWS)

    def update(self) -> None:
        """Take a step of the actor's optimizer."""
        with self.actor.train_mode():
            self.actor.optimizer_zero_grad()
            self.actor.forward_backward_batch(self.batch.clone(), self.kit.make_loss(), forward_only=False)
            self.actor.optimizer_step()

    def apart(self) -> float:
        """Return how far the log-probs of actor and reference lie apart."""
        columns = [self.kit.forward(engine, self.batch)["log_probs"] for engine in (self.actor, self.reference)]
        return float(self.kit.farthest(*columns))

    def weights(self) -> torch.Tensor:
        from verl_multiturn.verl_bridge.trainer.reference_worker import shards_of

        return torch.cat([each.float().flatten() for each in shards_of(self.reference.module).values()]).clone()


@pytest.fixture(scope="module")
def pair(kit: Any, model: Path) -> Pair:
    return Pair(kit, model)


def test_after_a_reset_the_next_batch_has_no_divergence(pair: Pair) -> None:
    assert pair.worker.look_at_reference() == ""
    pair.apart()  # the reference has computed before
    pair.update()
    assert pair.apart() > 1e-3
    assert pair.actor.optimizer.state
    pair.worker.reset_reference()
    assert pair.apart() <= 1e-6
    assert not pair.actor.optimizer.state
    before = pair.weights()
    pair.update()  # the optimizer makes its state anew
    assert pair.actor.optimizer.state
    assert torch.equal(pair.weights(), before)
    assert pair.apart() > 1e-3


def test_a_reference_of_less_precision_gets_rounded_weights(kit: Any, model: Path) -> None:
    pair = Pair(kit, model, model_dtype="bf16")
    pair.update()
    pair.worker.reset_reference()
    (given, got) = (next(iter(each.module.parameters())).to_local() for each in (pair.actor, pair.reference))
    assert got.dtype == torch.bfloat16
    assert torch.equal(given.bfloat16(), got)


def test_a_checkpoint_has_the_reference_once(pair: Pair, tmp_path: Path) -> None:
    from verl_multiturn.models.checkpoints import reference_folder

    name = "reference_world_size_1_rank_0.pt"
    first, second, third = (reference_folder(tmp_path / f"global_step_{step}") / name for step in (2, 3, 4))
    pair.worker.reset_reference()
    kept = pair.weights()
    for path in (first, second):
        pair.worker.save_reference(str(path.parent), 2)
    assert first.samefile(second)
    pair.update()
    pair.worker.reset_reference()
    moved = pair.weights()
    pair.worker.save_reference(str(third.parent), 4)
    pair.worker.save_reference(str(second.parent), 4)  # written over: the first one keeps its own
    assert third.samefile(second)
    assert [path.stat().st_nlink for path in (first, second, third)] == [1, 2, 2]
    assert [[*folder.iterdir()] for folder in (first.parent, third.parent)] == [[first], [third]]

    assert pair.worker.load_reference(str(first.parent)) == 2
    assert torch.equal(pair.weights(), kept)
    assert pair.worker.load_reference(str(third.parent)) == 4
    assert torch.equal(pair.weights(), moved)
    assert pair.worker.load_reference(str(tmp_path / "no_folder")) == 0
    assert torch.equal(pair.weights(), moved)
    third.unlink()  # as verl's rotation does; the next checkpoint is written anew
    fourth = tmp_path / "fourth"
    pair.worker.save_reference(str(fourth), 4)
    assert (fourth / name).stat().st_nlink == 1


def rank(number: int, ranks: int) -> Any:
    """Return a worker that has not loaded its models."""
    from verl_multiturn.verl_bridge.trainer.reference_worker import ReferenceWorker

    worker: Any = object.__new__(ReferenceWorker)
    worker._rank, worker._world_size = number, ranks
    return worker


def test_a_rank_whose_file_is_missing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "reference_world_size_2_rank_0.pt").touch()
    for number, ranks in ((1, 2), (0, 1)):
        missing = f"reference_world_size_{ranks}_rank_{number}.pt' is missing, expected the reference of rank {number}"
        with pytest.raises(ConfigError, match=missing):
            rank(number, ranks).load_reference(str(tmp_path))


def test_each_rank_removes_its_file_of_a_checkpoint_that_is_written_over(tmp_path: Path) -> None:
    place = tmp_path / "reference"
    place.mkdir()
    files = [place / f"reference_world_size_2_rank_{number}.pt" for number in range(2)]
    for file in files:
        file.touch()
    for number, file in enumerate(files):
        assert file.exists()
        rank(number, 2).save_reference(str(place), 0)
        assert not file.exists()
    assert not place.exists()
    rank(0, 2).save_reference(str(place), 0)


def test_a_reference_of_another_model_changes_nothing(pair: Pair, tmp_path: Path) -> None:
    before = pair.weights()
    file = tmp_path / "reference_world_size_1_rank_0.pt"
    shards = {"model.norm.weight": torch.zeros(63), "other": torch.zeros(1)}
    torch.save({"step": 2, "shards": shards}, file)
    with pytest.raises(ConfigError, match=r"the reference cannot get these parameters \(only one of them has .* more"):
        pair.worker.load_reference(str(tmp_path))
    assert torch.equal(pair.weights(), before)


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp"])
def test_each_rank_copies_its_own_part(kind: str, tmp_path: Path) -> None:
    """Two ranks; a root whose parameters FSDP keeps gathered, and layers that keep theirs or do not."""
    done = run_with_stack("-m", "tests.support.reference_ranks", kind, str(tmp_path / kind))
    assert done.returncode == 0, done.stderr
    for found in json.loads(done.stdout.splitlines()[-1]).values():
        assert found["faults"] == ""
        assert found["before"] > 0.1
        assert found["moved"] > 0.1
        assert found["states"] == [True, 0]
        assert found["buffers"] == [1.0, 2.0]  # the second one is in no checkpoint
        assert found["step"] == 3
        same = ["apart", *(f"{when}, kept={kept}" for when in ("after", "loaded") for kept in (False, True))]
        assert {name: found[name] for name in same} == dict.fromkeys(same, 0.0)


# The trainer's part.


class Workers:
    """A group of training workers without processes, which remembers its calls."""

    def __init__(self, steps: Sequence[int] = (0,), faults: Sequence[str] = ("", "")) -> None:
        self.steps, self.faults = list(steps), list(faults)
        self.asked: list[Any] = []

    def reset_reference(self) -> None:
        self.asked.append("reset")

    def save_reference(self, folder: str, step: int) -> None:
        self.asked.append((folder, step))

    def load_reference(self, folder: str) -> list[int]:
        self.asked.append(folder)
        return self.steps

    def look_at_reference(self) -> list[str]:
        return self.faults


def resets(**settings: Any) -> Any:
    from verl_multiturn.verl_bridge.trainer.reference_resets import ReferenceResets

    return ReferenceResets(ReferenceResetSettings(**settings))


def test_steps_between_resets() -> None:
    reference, workers, seen = resets(every=3), Workers(), []
    for step in range(1, 8):
        timing: dict[str, float] = {}
        reference.begin_step()
        reference.end_step(step, workers, timing)
        own = reference.metrics()
        seen.append((own["rollout/reference/step"], own["rollout/reference/reset"], [*timing]))
    reset = ["reference_reset"]
    assert seen == [(0, 0, []), (0, 0, []), (0, 1, reset), (3, 0, []), (3, 0, []), (3, 1, reset), (6, 0, [])]
    assert workers.asked == ["reset", "reset"]


COLUMNS = {
    "a_0_0": ([1, 0, 1], [-1.0, -9.0, -2.0], [-1.5, -1.0, -2.0]),
    "b_0_0": ([1], [-1.0], [-2.0]),
    "c_0_0": ([0, 0], [-1.0, -1.0], [-3.0, -3.0]),
}
KL = {"a": math.exp(-0.5) - 0.5, "b": math.exp(-1.0)}  # exp(reference - old) - (reference - old) - 1


@pytest.mark.parametrize(
    ("batches", "silent", "kl"),
    [
        ([["a_0_0", "b_0_0", "c_0_0"]], [], (KL["a"] + KL["b"]) / 3),
        ([["a_0_0"], ["b_0_0", "c_0_0"]], [], (KL["a"] + KL["b"]) / 3),
        ([["a_0_0", "b_0_0", "c_0_0"]], ["a"], KL["b"]),
        ([["c_0_0"]], [], None),
        ([["a_0_0"]], ["a"], None),
    ],
    ids=["one batch", "two updates", "a silent group", "nothing trained", "all silent"],
)
def test_the_divergence_is_that_of_the_trained_tokens(
    batches: list[list[str]], silent: list[str], kl: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn.verl_bridge.trainer import reference_resets

    def columns(keys: Sequence[RowKey], partition: str, names: Sequence[str]) -> dict[str, torch.Tensor]:
        assert (partition, names) == ("train", ["response_mask", "old_log_probs", "ref_log_prob"])
        found = [COLUMNS[str(key)] for key in keys]
        return {
            name: torch.nested.as_nested_tensor([torch.tensor(row[i]) for row in found], layout=torch.jagged)
            for i, name in enumerate(names)
        }

    monkeypatch.setattr(reference_resets, "get_columns", columns)
    for most, due in ((0.05, kl is not None), (0.5, False)):
        reference, workers = resets(kl_above=most), Workers()
        for keys in batches:
            reference.look(SimpleNamespace(real=[RowKey.parse(key) for key in keys], partition_id="train"), silent)
        reference.end_step(4, workers, {})
        assert workers.asked == ["reset"] * due
        own = reference.metrics()
        assert own.get("rollout/reference/kl") == (None if kl is None else pytest.approx(kl, abs=1e-6))
        assert own["rollout/reference/reset"] == due
        reference.begin_step()
        assert "rollout/reference/kl" not in reference.metrics()
        assert reference.metrics()["rollout/reference/step"] == 4 * due


def test_a_checkpoint_names_the_reference_in_force(tmp_path: Path) -> None:
    reference, workers = resets(every=2), Workers(steps=[2, 2])
    first, third = (tmp_path / f"global_step_{step}" for step in (1, 3))
    places = [str(folder / "actor" / "reference") for folder in (first, third)]
    reference.save(first, workers)  # the run's model: another run's files are removed
    reference.end_step(2, workers, {})
    reference.save(third, workers)
    assert workers.asked == [(places[0], 0), "reset", (places[1], 2)]
    assert [json.loads((each / "reference.json").read_text()) for each in (first, third)] == [{"step": 0}, {"step": 2}]
    resumed = resets(every=2)
    resumed.load(tmp_path / "global_step_3", workers)
    assert (resumed.step, resumed.metrics()["rollout/reference/step"]) == (2, 2)
    with pytest.raises(ConfigError, match=r"references of several steps, got \[0, 2\] \(0: none\)"):
        resumed.load(tmp_path / "global_step_3", Workers(steps=[2, 0]))


def test_a_reference_that_is_not_the_checkpoints_is_refused(tmp_path: Path) -> None:
    reference = resets(every=2)
    reference.load(tmp_path, Workers(steps=[4, 4]))
    assert reference.step == 4  # the checkpoint does not name one
    (tmp_path / "reference.json").write_text('{"step": 2}')
    for there in (0, 4):  # 0: a copy without the reference's folder
        with pytest.raises(ConfigError, match=rf"the reference of step {there} \(0: none\), expected that of step 2"):
            resets(every=2).load(tmp_path, Workers(steps=[there, there]))
    (tmp_path / "reference.json").write_text('{"step": 0}')
    reference.load(tmp_path, Workers(steps=[0, 4]))  # another machine's disk has another run's file
    assert reference.step == 0
    (tmp_path / "reference.json").write_text("[")
    with pytest.raises(ConfigError, match=r"reference\.json' holds '\[', expected"):
        reference.load(tmp_path, Workers())


def test_a_run_without_resets_does_not_drop_a_reference(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from verl_multiturn.verl_bridge.trainer.checkpoint_writes import begin_checkpoint
    from verl_multiturn.verl_bridge.trainer.reference_resets import require_no_reference

    folder = tmp_path / "global_step_3"
    require_no_reference(folder, True)
    (folder / "actor" / "reference").mkdir(parents=True)
    (folder / "actor" / "reference" / "file.pt").touch()
    with pytest.raises(ConfigError, match=r"the reference of this checkpoint, and without .*reference_reset the run"):
        require_no_reference(folder, True)
    require_no_reference(folder, False)
    assert "is not loaded: the run compares with no reference" in caplog.text
    (folder / "actor" / "reference" / "file.pt").unlink()
    (folder / "actor" / "reference").rmdir()
    (folder / "reference.json").write_text('{"step": 0}')
    require_no_reference(folder, True)
    (folder / "reference.json").write_text('{"step": 2}')  # its files are on another machine's disk
    with pytest.raises(ConfigError, match=r"the reference of this checkpoint"):
        require_no_reference(folder, True)
    begin_checkpoint(folder)  # one that is written over has no reference of before
    require_no_reference(folder, True)


def test_parts_that_differ_are_refused_before_the_first_step() -> None:
    reference = resets(every=2)
    reference.look_at(Workers())
    with pytest.raises(ConfigError, match=r"not divided as the actor's are \(x is \(2,\)\); give"):
        reference.look_at(Workers(faults=["", "x is (2,)"]))


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_our_trainers_choose_a_worker_that_resets(mode: str) -> None:
    from verl.trainer.ppo.utils import Role

    from tests.trainer_config import compose_config
    from verl_multiturn.verl_bridge.trainer import trainers
    from verl_multiturn.verl_bridge.trainer.real_copies import RealCopiesWorker
    from verl_multiturn.verl_bridge.trainer.reference_worker import DetachedReferenceWorker, ReferenceWorker

    classes = [trainers.MultiTurnSync, trainers.MultiTurnColocateAsync, trainers.MultiTurnSeparateAsync]
    trainer: Any = object.__new__(next(each for each in classes if each.mode == mode))
    trainer.config = compose_config([f"{ACTOR}.use_kl_loss=True", "trainer.n_gpus_per_node=1"])
    trainer.use_critic, trainer.use_reference_policy, trainer.use_teacher_policy = False, True, False
    trainer._enable_hybrid_replicas = True
    trainer.reference = resets(every=2)
    trainer._init_resource_pool_mgr()
    worker = trainer.role_worker_mapping[Role.ActorRolloutRef].__ray_actor_class__
    assert worker is (DetachedReferenceWorker if mode == "separate_async" else ReferenceWorker)
    assert issubclass(worker, RealCopiesWorker) == (mode == "separate_async")
    # verl finds the methods of a worker by the mark of `register`.
    for name in ("look_at_reference", "reset_reference", "save_reference", "load_reference", "update_actor"):
        assert hasattr(getattr(worker, name), "attrs_3141562937"), name


def test_a_worker_of_somebody_else_is_refused() -> None:
    from verl_multiturn.verl_bridge.trainer.reference_resets import with_our_workers

    with pytest.raises(ConfigError, match=r"needs a training worker of verl's own, got .*dict"):
        with_our_workers({"actor": SimpleNamespace(__ray_actor_class__=dict)})


# Runs that are refused.


def refuse(**changes: str) -> list[str]:
    """Return the warnings about a run."""
    from verl_multiturn.verl_bridge.startup.refusals.reference import REFERENCE, is_on
    from verl_multiturn.verl_bridge.startup.table import Section, check
    from verl_multiturn.verl_bridge.startup.view import RunView

    told: list[str] = []

    class View(RunView):
        def tell(self, message: str) -> None:
            told.append(message)

    settings = {f"+{KEY}.every": "2", f"{ACTOR}.use_kl_loss": "True", **changes}
    check(View(composed(**settings)), [Section("", REFERENCE, is_on)])
    return told


def test_a_run_of_fsdp_is_accepted() -> None:
    assert refuse() == []
    assert refuse(**{f"{ACTOR}.strategy": "fsdp2"}) == []
    assert refuse(**{f"{ACTOR}.use_kl_loss": "False", "algorithm.use_kl_in_reward": "True"}) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({f"{ACTOR}.use_kl_loss": "False"}, "compares the actor with no reference; set .*use_kl_loss=True"),
        ({"trainer.use_v1": "False"}, "only verl's own V1 trainers take it"),
        ({f"{ACTOR}.strategy": "veomni"}, "strategy='veomni': reference_reset is for FSDP"),
        ({f"{REF}.strategy": "fsdp2"}, "would hold other parts of the reference"),
        ({"actor_rollout_ref.model.lora_rank": "8"}, "lora_rank=8: .* the model without it; train without an adapter"),
        (
            {"trainer.v1.trainer_mode": "separate_async", "actor_rollout_ref.hybrid_engine": "False"},
            "hybrid_engine=False: reference_reset needs actor and reference in one worker",
        ),
        ({f"{ACTOR}.fsdp_config.fsdp_size": "2"}, r"fsdp_size=2 with .*ref\.fsdp_config\.fsdp_size=-1: a rank"),
        ({f"{ACTOR}.fsdp_config.use_orig_params": "True"}, "use_orig_params=True with"),
        ({f"{ACTOR}.fsdp_config.wrap_policy.min_num_params": "7"}, "wrap_policy="),
    ],
)
def test_other_runs_are_refused_by_name(changes: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        refuse(**changes)


def test_megatron_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="strategy='megatron': reference_reset is for FSDP"):
        refuse(model_engine="megatron")


def test_another_precision_is_a_warning() -> None:
    (told,) = refuse(**{f"{REF}.fsdp_config.model_dtype": "bf16"})
    assert "model_dtype='fp32' with" in told
    assert "the divergence is not 0, but that of rounding" in told
