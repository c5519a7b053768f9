"""The certificate within verl: what reaches the trainer, and a batch that is not what the engine returned."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT

# Importing verl's trainers says which optional engines are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call><|im_end|>'


def make_output(uid: str, session_id: int, turns: list[str]) -> Any:
    """What our agent loop hands verl for a conversation with a scripted engine."""
    import asyncio

    from omegaconf import OmegaConf
    from transformers import AutoTokenizer

    from benchmarks.turn_cost import make_config
    from verl_multiturn import ScriptedEngine
    from verl_multiturn.verl_bridge.agent_loop import MultiTurnAgentLoop, build_runner

    config = make_config(500)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes" / "quickstart" / "model")
    rollout = config.actor_rollout_ref.rollout
    OmegaConf.update(rollout, "multi_turn.tool_config_path", str(ROOT / "tool_configs" / "calculator.yaml"))
    engine = ScriptedEngine([tokenizer.encode(turn) for turn in turns], version=3)
    loop = object.__new__(MultiTurnAgentLoop)
    loop._runner = build_runner(rollout, tokenizer, engine, "qwen2", {})
    row = {"raw_prompt": [{"role": "user", "content": "1+1"}], "uid": uid, "session_id": session_id, "global_steps": 4}
    return asyncio.run(loop.run({"temperature": 1.0, "logprobs": True}, **row))


class Store:
    """TransferQueue in this process: a column that one of the asked rows lacks is left out."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, Any]] = {}

    def add(self, uid: str, session_id: int, output: Any) -> dict[str, Any]:
        """As `AgentLoopWorkerTQ` does it."""
        import torch

        fields: dict[str, Any] = output.as_dict()
        fields.update(uid=uid, session_id=session_id, loss_mask=fields["response_mask"])
        fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]])
        fields["position_ids"] = torch.arange(len(fields["input_ids"]))
        fields["advantages"] = fields["response_mask"].float()
        key = f"{uid}_{session_id}_0"
        self.rows[key] = fields
        tags = ("min_global_steps", "max_global_steps")
        self.tags[key] = {name: fields["extra_fields"].get(name) for name in tags}
        return fields

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        rows = [self.rows[key] for key in keys]
        names = [name for name in select_fields if all(name in row for row in rows)]
        return list_of_dict_to_tensordict([{name: row[name] for name in names} for row in rows])

    def batch(self) -> Any:
        return SimpleNamespace(keys=list(self.rows), tags=list(self.tags.values()), partition_id="train")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    from verl_multiturn.verl_bridge import certificate

    store = Store()
    monkeypatch.setattr(certificate, "transfer_queue", store)
    for session, turns in enumerate([["2<|im_end|>"], [CALL, "2<|im_end|>"], [CALL, CALL, "2<|im_end|>"], []]):
        store.add("u", session, make_output("u", session, turns))
    return store


def make_trainer(share: float = 1.0, **rollout_correction: Any) -> Any:
    from omegaconf import OmegaConf

    from verl_multiturn.verl_bridge.certificate import CertificateMixin

    class Base:
        def __init__(self, config: Any) -> None:
            self.config = config
            self.global_steps, self.local_trigger_step = 4, 0

        def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
            for batch in self.batches:
                self._compute_advantage(batch, metrics)

        def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
            return batch

    class Trainer(CertificateMixin, Base):
        mode = "sync"
        batches: list[Any]

    settings = {"custom": {"multiturn": {"certificate_share": share}}}
    config = {
        "trainer": {"v1": {"trainer_mode": "multiturn_sync"}},
        "actor_rollout_ref": {"rollout": settings},
        "algorithm": {"rollout_correction": rollout_correction},
    }
    return Trainer(OmegaConf.create(config))


def step(trainer: Any, *batches: Any) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    trainer.batches = list(batches)
    trainer.step(metrics, {})
    return {name.removeprefix("rollout/certificate/"): value for name, value in metrics.items()}


def test_an_honest_batch(store: Store) -> None:
    trainer = make_trainer()
    assert trainer.config.trainer.v1.trainer_mode == "sync"
    metrics = step(trainer, store.batch())
    seconds = metrics.pop("seconds")
    tokens = sum(int(row["response_mask"].sum()) for row in store.rows.values())
    assert metrics == {"rows": 4, "tokens": tokens, "violations": 0, "unverified": 0}
    assert 0 < seconds < 5
    # Sums over the updates of a step.
    assert step(trainer, store.batch(), store.batch())["rows"] == 8


def test_a_corrupted_batch_ends_the_run(store: Store) -> None:
    from verl_multiturn import CertificateError

    row = store.rows["u_1_0"]
    token = len(row["prompts"]) + 2
    row["rollout_log_probs"][2] = -0.25
    with pytest.raises(
        CertificateError, match=rf"step 4: .*\n  request \w+ \(row u_1_0\), turn 0, token {token}: logp"
    ):
        step(make_trainer(), store.batch())


def test_swapped_rows_end_the_run(store: Store) -> None:
    from verl_multiturn import CertificateError

    store.rows["u_1_0"], store.rows["u_2_0"] = store.rows["u_2_0"], store.rows["u_1_0"]
    with pytest.raises(CertificateError, match=r"called 'u_1_0', the receipts are of uid 'u' and session 2"):
        step(make_trainer(), store.batch())


def test_a_row_of_ours_without_receipts_ends_the_run(store: Store) -> None:
    import torch

    from verl_multiturn import CertificateError

    del store.rows["u_1_0"]["rollout_receipts"]
    with pytest.raises(CertificateError, match="row u_1_0: no receipt"):
        step(make_trainer(), store.batch())
    store.rows["u_1_0"]["rollout_receipts"] = torch.zeros(9, dtype=torch.uint8)
    with pytest.raises(CertificateError, match="row u_1_0: 9 bytes that are no receipts"):
        step(make_trainer(), store.batch())


def test_rows_of_other_loops_are_counted(store: Store) -> None:
    for name in ("rollout_receipts", "rollout_versions"):
        del store.rows["u_1_0"][name]
    metrics = step(make_trainer(), store.batch())
    assert (metrics["rows"], metrics["unverified"]) == (3, 1)


def test_verls_padding_rows(store: Store) -> None:
    from verl.trainer.ppo.padding_utils import construct_minimal_padding_template

    from verl_multiturn import CertificateError

    source = next(iter(store.rows))
    row, tag = construct_minimal_padding_template(store.rows[source], store.tags[source], 0)
    row["advantages"] = row["response_mask"].float()
    store.rows["padx_0_0"], store.tags["padx_0_0"] = {**row, "uid": "padx"}, tag
    assert step(make_trainer(), store.batch())["rows"] == 5
    row["response_mask"][0] = 1
    with pytest.raises(CertificateError, match=r"row padx_0_0.*mask is 1"):
        step(make_trainer(), store.batch())


def test_a_share_of_the_rows(store: Store) -> None:
    assert step(make_trainer(share=0.5), store.batch())["rows"] == 2
    assert step(make_trainer(share=0.0), store.batch())["rows"] == 0


def test_rejection_sampling_may_mask_rows(store: Store) -> None:
    from verl_multiturn import CertificateError

    row = store.rows["u_1_0"]
    row["response_mask"] = row["response_mask"] * 0
    assert step(make_trainer(rollout_rs="token_k1"), store.batch())["violations"] == 0
    with pytest.raises(CertificateError, match="mask is 0"):
        step(make_trainer(rollout_rs=None), store.batch())


def test_receipts_stay_out_of_what_a_reward_function_sees() -> None:
    output = make_output("u", 0, ["2<|im_end|>"])
    fields = output.as_dict()
    assert not any("receipt" in name for name in fields["extra_fields"])
    assert fields["rollout_receipts"].dtype.itemsize == 1
    np.testing.assert_array_equal(fields["rollout_versions"], [3] * len(fields["responses"]))


def test_verl_finds_our_trainers_by_name() -> None:
    from verl.trainer.ppo.v1 import get_trainer_cls

    for mode in ("sync", "colocate_async", "separate_async"):
        ours = get_trainer_cls(f"multiturn_{mode}")
        assert issubclass(ours, get_trainer_cls(mode))
