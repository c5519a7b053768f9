"""The engine's log-probs in the place of old ones: a batch is computed in part, or as a whole."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.trainer_rows import CALL, WritableStore, make_output, put_in_place

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

ROWS = 34
STEP = 4
"""The step after that whose weights, of version 3, sampled the rows."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> WritableStore:
    store = WritableStore()
    put_in_place(store, monkeypatch)
    for session in range(ROWS):
        made = make_output("u", session, [CALL, "2<|im_end|>"]) if session == 0 else _again(store)
        del store.add("u", session, made)["old_log_probs"]
    return store


def _again(store: WritableStore) -> Any:
    """Return an output whose row is a copy of the first one's."""
    first = store.rows["u_0_0"]
    return SimpleNamespace(as_dict=lambda: {name: _copy(value) for name, value in first.items()})


def _copy(value: Any) -> Any:
    return value.clone() if hasattr(value, "clone") else value


class Computed:
    """verl's pass: the engine's log-probs with an error, and the number of rows of each call."""

    def __init__(self, store: WritableStore, error: float) -> None:
        self._store, self._error = store, error
        self.calls: list[int] = []

    def __call__(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self.calls.append(len(batch.keys))
        for key in batch.keys:
            row = self._store.rows[key]
            row["old_log_probs"] = row["rollout_log_probs"] - self._error
        metrics["actor/entropy"] = float(len(batch.keys))
        return batch


def compute(
    store: WritableStore, bound: float = 0.01, error: float = 0.0, update: int = 0, step: int = STEP, micro: int = 2
) -> tuple[list[int], dict[str, float], set[str]]:
    """Return the sizes of verl's passes, our metrics, and the rows that took the engine's log-probs."""
    from omegaconf import OmegaConf

    from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows
    from verl_multiturn.verl_bridge.trainer.rows.engine_log_probs import EngineLogProbs

    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"log_prob_micro_batch_size_per_gpu": micro}}})
    engines, verls, batch = EngineLogProbs(bound, config), Computed(store, error), store.batch()
    workers = SimpleNamespace(_dispatch_info={"actor": [0]})
    found = engines.compute(batch, {}, BatchRows(batch), step, update, verls, workers)
    assert found.keys == batch.keys
    return verls.calls, engines.metrics(), {str(key) for key in engines.taken}


def test_a_sample_agrees_and_the_other_rows_take_the_engines(store: WritableStore) -> None:
    calls, metrics, taken = compute(store, error=0.005)
    assert calls == [4]  # a sixteenth of 34, rounded up to a multiple of 2
    assert len(taken) == 30
    assert metrics["rollout/old_log_prob/engine_share"] == pytest.approx(30 / 34)
    assert metrics["rollout/old_log_prob/error_max"] == pytest.approx(0.005, abs=1e-6)
    assert metrics["rollout/old_log_prob/error_mean"] == pytest.approx(0.005, abs=1e-6)
    for key, row in store.rows.items():
        moved = 0.0 if key in taken else 0.005
        assert row["old_log_probs"].tolist() == pytest.approx([x - moved for x in row["rollout_log_probs"].tolist()])


def test_beyond_the_bound_all_rows_are_computed(store: WritableStore) -> None:
    calls, metrics, taken = compute(store, error=0.02)
    assert calls == [4, 34]
    assert taken == set()
    assert metrics["rollout/old_log_prob/engine_share"] == 0
    assert metrics["rollout/old_log_prob/error_max"] == pytest.approx(0.02, abs=1e-6)


def test_no_number_is_beyond_every_bound(store: WritableStore) -> None:
    assert compute(store, bound=1e9, error=float("nan"))[0] == [4, 34]


@pytest.mark.parametrize("asked", [{"update": 1}, {"step": 5}, {"micro": 34}])
def test_a_later_update_older_tokens_or_a_pass_that_cannot_be_divided(
    store: WritableStore, asked: dict[str, int]
) -> None:
    calls, metrics, _ = compute(store, **asked)  # type: ignore[arg-type]
    assert calls == [34]
    assert metrics == {"rollout/old_log_prob/engine_share": 0}


def test_one_older_token_is_enough(store: WritableStore) -> None:
    row = store.rows["u_20_0"]
    row["rollout_versions"][row["response_mask"].nonzero()[0]] = 2
    assert compute(store)[0] == [34]


def test_rows_without_the_engines_log_probs(store: WritableStore) -> None:
    del store.rows["u_20_0"]["rollout_log_probs"]
    with pytest.raises(KeyError, match="rollout_log_probs"):  # of verl's pass, which got the whole batch
        compute(store)
