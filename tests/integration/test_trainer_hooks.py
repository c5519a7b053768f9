"""Actions of `MultiTurnHooks` around verl's own methods: loading a checkpoint, drawing prompts, a step's end."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.test_joining import Run, add
from tests.integration.trainer_rows import WritableStore, make_trainer, put_in_place

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

FILTER = "actor_rollout_ref__rollout__custom__multiturn__filter"


def with_pools(**changes: Any) -> Any:
    """Return a trainer whose filter has pools of rows, which record their calls."""
    from verl_multiturn.verl_bridge.trainer.groups.signal_filter import SignalFilter

    trainer = make_trainer("colocate_async", **{FILTER: "difficulty"}, **changes)
    noted = trainer.noted = []
    trainer._sampler.filter = found = SignalFilter("difficulty", 4, 4)
    found.restore = lambda kept: noted.append(("restore", kept))  # type: ignore[method-assign]
    found.pools = SimpleNamespace(keep=lambda prompts, rows: noted.append(("keep", list(prompts), rows)))
    trainer.train_dataset = [1, 2, 3]
    return trainer


@pytest.mark.parametrize(("found", "named"), [(0, False), (3, False), (3, True)])
def test_a_checkpoint_is_loaded_with_what_was_trained(
    found: int, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn.verl_bridge.trainer import hooks

    mode = {"trainer__resume_mode": "resume_path" if named else "auto", "trainer__resume_from_path": "elsewhere"}
    trainer = with_pools(trainer__default_local_dir=str(tmp_path), **mode)
    noted = trainer.noted
    type(trainer).__mro__[-2]._load_checkpoint = lambda self: setattr(self, "global_steps", found)
    trainer._history = SimpleNamespace(load=lambda folder: noted.append(("load", folder)) or {"filter": {"right": []}})
    trainer._outages = SimpleNamespace(doubt=lambda uids: noted.append(("doubt", uids)))
    prompts = {"u": {"status": "finished"}, "v": {"status": "pending"}}
    monkeypatch.setattr(hooks, "list_prompts", lambda partition: prompts)
    trainer._load_checkpoint()
    folder = Path("elsewhere") if named else tmp_path / "global_step_3"
    restored = [("load", folder), ("restore", {"right": []}), ("keep", ["u", "v"], 3), ("doubt", ["u"])]
    assert noted == (restored if found else [])
    assert trainer.saved_step == (3 if found and not named else None)


def test_prompts_are_drawn_from_the_pools_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge.trainer import hooks

    def draw(pools: Any, fetch: Any, rows: Any) -> Any:
        return pools, fetch(), rows

    monkeypatch.setattr(hooks, "draw_prompt", draw)
    trainer = with_pools()
    type(trainer).__mro__[-2]._fetch_one_gen_batch = lambda self: "verl's"
    trainer.train_dataset = SimpleNamespace(is_numbered=False)
    assert trainer._fetch_one_gen_batch() == (trainer._sampler.filter.pools, "verl's", trainer.train_dataset)
    assert trainer.train_dataset.is_numbered
    trainer._sampler.filter.pools = None
    assert trainer._fetch_one_gen_batch() == "verl's"


def test_a_run_that_records_joins_while_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge.trainer import hooks

    noted: list[str] = []

    @contextlib.contextmanager
    def run(*given: Any) -> Iterator[None]:
        noted.append("begin" if given == (trainer,) else "begin with others")
        yield
        noted.append("end")

    monkeypatch.setattr(hooks, "close_workers", lambda workers: noted.append(f"close {workers}"))
    manager, trainer = SimpleNamespace(agent_loop_workers=["w"]), make_trainer()
    type(trainer).__mro__[-2].fit = lambda self, given: noted.append("fit")
    trainer.fit(manager)
    trainer._joining = SimpleNamespace(run=run)
    trainer.fit(manager)
    assert noted == ["fit", "close ['w']", "begin", "fit", "end", "close ['w']"]


def test_a_run_that_records_counts_what_its_workers_could_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn.verl_bridge.workers.news import RunNews

    store = WritableStore()
    put_in_place(store, monkeypatch)
    add(store, "u", [1.0, 0.0, 0.0, 1.0])
    run = Run(store, tmp_path)
    run.trainer.agent_loop_manager = SimpleNamespace(news=lambda of_all: RunNews(dropped=3))
    metrics = run.step(store.batch())
    assert metrics["rollout/records/dropped"] == 3
    assert "rollout/async/cut_samples" not in metrics  # nothing is over-sampled


@pytest.mark.parametrize(("save_freq", "saves"), [(-1, False), (0, False), (1, True)])
def test_a_run_without_checkpoints_writes_no_history(save_freq: int, saves: bool) -> None:
    trainer = make_trainer("colocate_async", trainer__save_freq=save_freq)
    assert (trainer._saves, trainer._history is not None) == (saves, True)
    assert make_trainer(trainer__save_freq=save_freq)._history is None


def test_agent_loops_ask_our_servers_through_our_client(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge.trainer import hooks

    checked: list[Any] = []
    monkeypatch.setattr(hooks, "require_ours", checked.extend)
    monkeypatch.setattr(hooks, "RolloutClient", lambda *given: given)
    verls = SimpleNamespace(config="config", _load_balancer="balancer")
    trainer = make_trainer()
    trainer.llm_server_manager = SimpleNamespace(get_replicas=lambda: ["own"])
    trainer.standalone_server_manager = SimpleNamespace(get_replicas=lambda: ["apart"])
    type(trainer).__mro__[-2].get_llm_client = lambda self: verls
    for ours, client, looked_at in ((False, verls, []), (True, ("config", "balancer"), ["own", "apart"])):
        monkeypatch.setattr(hooks, "runs_our_server", lambda rollout, ours=ours: ours)
        assert trainer.get_llm_client() == client
        assert checked == looked_at


def test_servers_that_live_make_room_where_one_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge.trainer import hooks

    def require(replicas: Any) -> None:
        if replicas:
            raise hooks.ServerDied("one died")

    noted: list[str] = []
    monkeypatch.setattr(hooks, "require_alive", require)
    trainer, replicas = make_trainer(), list[str]()
    trainer.llm_server_manager = SimpleNamespace(get_replicas=lambda: replicas)
    made = {name: lambda name=name: noted.append(name) for name in ("abort_replicas", "sleep_replicas")}
    trainer.checkpoint_manager = SimpleNamespace(**made)
    trainer._require_colocated()
    assert noted == []
    replicas.append("dead")
    with pytest.raises(hooks.ServerDied, match="one died"):
        trainer._require_colocated()
    assert noted == ["abort_replicas", "sleep_replicas"]


def test_a_mistake_of_the_reward_function_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.errors import RewardContractError
    from verl_multiturn.verl_bridge.trainer import hooks

    noted: list[str] = []
    monkeypatch.setattr(hooks, "close_workers", lambda workers: None)
    trainer = make_trainer(trainer__default_local_dir=str(tmp_path))
    trainer.look_after_servers = lambda: noted.append("looked")
    made = {name: lambda name=name: noted.append(name) for name in ("abort_replicas", "sleep_replicas")}
    trainer.checkpoint_manager = SimpleNamespace(**made)
    trainer.agent_loop_manager = manager = SimpleNamespace(agent_loop_workers=[], mistake="")
    trainer.look_after()
    trainer._whole = 0
    manager.mistake = "it returned None"
    for waits in (trainer.look_after, trainer.on_step_begin):
        type(trainer).__mro__[-2].fit = lambda self, given, waits=waits: waits()
        with pytest.raises(RewardContractError) as ended:
            trainer.fit(manager)
        assert str(ended.value) == "it returned None; no step was trained yet, so nothing was saved"
    room = ["abort_replicas", "sleep_replicas"]
    assert noted == ["looked", "looked", *room, *room]


def test_what_the_functions_of_reward_workers_return_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_multiturn.verl_bridge.trainer import hooks

    seen: list[Any] = []
    monkeypatch.setattr(hooks, "check_workers", seen.append)
    trainer = make_trainer()
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_workers=["a", "b"])
    type(trainer).__mro__[-2].get_reward_handles = lambda self: "verl's"
    assert (trainer.get_reward_handles(), seen) == ("verl's", [["a", "b"]])


def test_a_filter_of_groups_knows_what_an_outage_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    from verl_multiturn.verl_bridge.trainer import hooks
    from verl_multiturn.verl_bridge.trainer.groups.replay_buffer import replay_buffer_from

    monkeypatch.setattr(hooks, "close_workers", lambda workers: None)
    trainer = make_trainer("colocate_async")
    trainer._sampler = buffer = replay_buffer_from(ReplayBuffer("sync", {}, None, "drop", {}), None, 2)
    type(trainer).__mro__[-2].fit = lambda self, given: "trained"
    assert trainer.fit(SimpleNamespace(agent_loop_workers=[], wait="waits")) == "trained"
    assert (buffer.filter.left_out, buffer.look_after) == (trainer._outages.causes, trainer.look_after)


def test_a_step_that_joins_nothing_has_its_metrics() -> None:
    told: list[dict[str, Any]] = []
    trainer = make_trainer()
    type(trainer).__mro__[-2]._compute_metrics = lambda self, batch, metrics, times: told.append(metrics)
    trainer._compute_metrics(None, {"a": 1}, {})
    assert told == [{"a": 1}]


def test_what_looks_at_batches_sees_each_before_it_is_counted() -> None:
    from verl_multiturn.verl_bridge.trainer.report import observe_samples

    buffer = SimpleNamespace(sample=lambda *given: (SimpleNamespace(keys=[], tags=[], partition_id="val"), given))
    sample, seen = buffer.sample, list[Any]()
    with observe_samples(buffer, [], seen.append):
        assert buffer.sample(7)[1] == (7,)
    assert len(seen) == 1
    assert buffer.sample is sample


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize(("whole", "serves", "version"), [(None, True, None), (None, False, 4), (5, True, 5)])
def test_servers_get_weights_when_they_have_started(
    ready: bool, whole: int | None, serves: bool, version: int | None
) -> None:
    from verl_multiturn.verl_bridge.trainer.trainers import MultiTurnSeparateAsync

    noted: list[Any] = []
    trainer: Any = MultiTurnSeparateAsync.__new__(MultiTurnSeparateAsync)
    trainer._require_colocated, trainer.global_steps, trainer._whole = lambda: noted.append("alive"), 5, whole
    trainer.standalone_checkpoint_manager = SimpleNamespace(update_weights=noted.append)
    trainer._servers = SimpleNamespace(
        look=lambda: noted.append("looked"),
        ready=lambda: ready,
        any_serves=lambda: serves,
        send_weights=lambda send: send(),
    )
    trainer.look_after_servers()
    assert noted == ["alive", "looked"] + [version] * (ready and version is not None)
