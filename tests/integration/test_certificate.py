"""The certificate within verl: the batch of the trainer, and batches that differ from the engine's tokens."""

import dataclasses
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from tests.integration.trainer_rows import CALL, Store, make_output, put_in_place

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    put_in_place(store, monkeypatch)
    for session, turns in enumerate([["2<|im_end|>"], [CALL, "2<|im_end|>"], [CALL, CALL, "2<|im_end|>"], []]):
        store.add("u", session, make_output("u", session, turns))
    return store


def make_verifier(
    share: float = 1.0, critic: bool = False, data: dict[str, Any] | None = None, void: bool = False, **correction: Any
) -> Any:
    from omegaconf import OmegaConf

    from verl_multiturn.verl_bridge.trainer.verify import BatchVerifier

    settings = {
        "custom": {"multiturn": {"certificate_share": share}},
        "agent": {"default_agent_loop": "multiturn_agent", "agent_loop_config_path": None},
    }
    config = {
        "data": data or {},
        "actor_rollout_ref": {"rollout": settings},
        "algorithm": {"rollout_correction": correction},
    }
    return BatchVerifier(OmegaConf.create(config), critic, void)


def step(verifier: Any, *batches: Any) -> dict[str, Any]:
    from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows

    verifier.begin_step()
    for update, batch in enumerate(batches):
        verifier.verify(BatchRows(batch), 4, update)
    return {name.removeprefix("rollout/certificate/"): value for name, value in verifier.metrics().items()}


def test_an_honest_batch(store: Store) -> None:
    verifier = make_verifier()
    started = time.perf_counter()
    metrics = step(verifier, store.batch())
    elapsed = time.perf_counter() - started
    seconds = metrics.pop("seconds")
    tokens = sum(int(row["response_mask"].sum()) for row in store.rows.values())
    # Nothing was sampled in the last one.
    expected = {"rows": 4, "tokens": tokens, "unsampled": 1, "not_trained_role": 0, "violations": 0, "unverified": 0}
    assert metrics == expected
    assert 0 < seconds <= elapsed
    # The metrics are sums over the updates of a step.
    assert step(verifier, store.batch(), store.batch())["rows"] == 8


def test_a_corrupted_batch_ends_the_run(store: Store) -> None:
    from verl_multiturn import CertificateError

    row = store.rows["u_1_0"]
    token = len(row["prompts"]) + 2
    row["rollout_log_probs"][2] = -0.25
    place = rf"request \w+ \(row u_1_0\), turn 0, token {token}: logp"
    with pytest.raises(CertificateError, match=rf"step 4: .*1 violations in 4 rows.*\n  {place}"):
        step(make_verifier(), store.batch())


def test_only_rows_with_void_turns_may_be_masked_for_them(store: Store) -> None:
    import torch

    from verl_multiturn import CertificateError

    verifier = make_verifier(void=True)
    assert step(verifier, store.batch())["violations"] == 0
    row = store.rows["u_1_0"]
    nothing = torch.zeros_like(row["response_mask"])
    row.update(response_mask=nothing, loss_mask=nothing)
    with pytest.raises(CertificateError, match=r"row u_1_0\W.*mask"):
        step(verifier, store.batch())


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_as_many_violations_are_told_as_can_be_read(store: Store, rows: int) -> None:
    from verl_multiturn import CertificateError

    for row in list(store.rows.values())[:rows]:
        for name in ("advantages", "old_log_probs"):
            row[name] = row[name] * float("nan")
    with pytest.raises(CertificateError, match=rf"\({2 * rows} violations in 4 rows\)") as raised:
        step(make_verifier(), store.batch())
    told = str(raised.value).splitlines()[1:]
    assert len([line for line in told if line.startswith("  request")]) == min(2 * rows, 5)
    assert told[5:] == ([f"  and {2 * rows - 5} more"] if rows > 2 else [])


def test_swapped_rows_end_the_run(store: Store) -> None:
    from verl_multiturn import CertificateError

    store.rows["u_1_0"], store.rows["u_2_0"] = store.rows["u_2_0"], store.rows["u_1_0"]
    with pytest.raises(CertificateError, match=r"called 'u_1_0', the receipts are of 'u_2_0'"):
        step(make_verifier(), store.batch())


# The data names the loop of each row, and the check does not read the data: some rows may be of another loop.
MIXED = {"custom_cls": {"path": "my_dataset.py"}}


@pytest.mark.parametrize("data", [{}, MIXED])
@pytest.mark.parametrize("lost", ["rollout_receipts", "rollout_versions", "rollout_log_probs", "old_log_probs"])
def test_a_row_of_ours_without_receipts_ends_the_run(store: Store, data: dict[str, Any], lost: str) -> None:
    import torch

    from verl_multiturn import CertificateError

    column = store.rows["u_1_0"].pop(lost)
    with pytest.raises(CertificateError, match=rf"1 violations in 4 rows.*\n  request of row u_1_0: .*without {lost}$"):
        step(make_verifier(data=data), store.batch())
    store.rows["u_1_0"][lost] = torch.zeros(9, dtype=column.dtype)
    with pytest.raises(CertificateError, match=r"row u_1_0\W.*(9 bytes that are no receipts|shape \[9\])"):
        step(make_verifier(data=data), store.batch())


def lose(store: Store, *keys: str) -> None:
    """Remove every trace of our agent loop from these rows."""
    for key in keys:
        for name in ("rollout_receipts", "rollout_versions"):
            del store.rows[key][name]
        del store.rows[key]["metrics"]["rollout"]


def test_rows_of_other_loops_are_counted_where_there_may_be_some(store: Store, tmp_path: Path) -> None:
    import pandas as pd

    from verl_multiturn import CertificateError

    lose(store, "u_1_0")
    del store.rows["u_1_0"]["rollout_log_probs"]
    row = {"prompt": [{"role": "user", "content": "Q"}]}
    names = ["multiturn_agent", "single_turn_agent"]
    pd.DataFrame([{**row, "agent_name": name} for name in names]).to_parquet(tmp_path / "both.parquet")
    pd.DataFrame([{**row, "agent_name": names[0]}]).to_parquet(tmp_path / "ours.parquet")
    for data in (MIXED, {"train_files": str(tmp_path / "both.parquet")}):
        before = store.calls
        metrics = step(make_verifier(data=data), store.batch())
        assert (metrics["rows"], metrics["unverified"]) == (3, 1)
        assert store.calls - before == 3  # the same for any number of rows
    for data in ({}, {"train_files": str(tmp_path / "ours.parquet"), "val_files": str(tmp_path / "both.parquet")}):
        with pytest.raises(CertificateError, match="row u_1_0: it came without rollout_log_probs and rollout_versions"):
            step(make_verifier(data=data), store.batch())


def test_receipts_that_every_row_has_lost_end_the_run(store: Store) -> None:
    from verl_multiturn import CertificateError

    lose(store, *store.rows)
    with pytest.raises(CertificateError, match="4 violations in 4 rows"):
        step(make_verifier(), store.batch())
    assert step(make_verifier(data=MIXED), store.batch())["unverified"] == 4


def test_a_row_twice_in_the_batch_ends_the_run(store: Store) -> None:
    from verl_multiturn import CertificateError

    batch = store.batch()
    batch.keys.append("u_1_0")
    batch.tags.append(store.tags["u_1_0"])
    with pytest.raises(CertificateError, match="row u_1_0: it is 2 times in the batch"):
        step(make_verifier(share=0.1), batch)
    store.rows["u_1_1"], store.tags["u_1_1"] = store.rows["u_1_0"], store.tags["u_1_0"]
    with pytest.raises(CertificateError, match=r"row u_1_1.*: the row is called 'u_1_1', the receipts are of 'u_1_0'"):
        step(make_verifier(), store.batch())


def renamed(row: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a row whose receipts were made anew with these changes."""
    import torch

    from verl_multiturn.certificate.receipts import Receipts

    receipts = dataclasses.replace(Receipts.from_bytes(row["rollout_receipts"].numpy().tobytes()), **changes)
    return {**row, "rollout_receipts": torch.from_numpy(np.frombuffer(receipts.to_bytes(), np.uint8).copy())}


def test_one_conversation_under_two_names_ends_the_run(store: Store) -> None:
    from verl_multiturn import CertificateError

    store.rows["u_7_0"], store.tags["u_7_0"] = renamed(store.rows["u_1_0"], session_id=7), store.tags["u_1_0"]
    with pytest.raises(
        CertificateError, match=r"1 violations in 5 rows.*\n  request \w+: it is in the batch as 'u_1_0'"
    ):
        step(make_verifier(), store.batch())
    # A request of its own with the same words is not a violation: two short answers may well be equal.
    store.rows["u_7_0"] = renamed(store.rows["u_1_0"], session_id=7, request_id="another")
    assert step(make_verifier(), store.batch())["rows"] == 5


def test_receipts_that_were_lost_are_no_conversation_without_a_generation(store: Store) -> None:
    from verl_multiturn import CertificateError

    row = renamed(store.rows["u_1_0"], generations=[])
    for name in ("response_mask", "loss_mask", "rollout_log_probs"):
        row[name] = row[name] * 0
    row["rollout_versions"] = row["rollout_versions"] * 0 - 1
    store.rows["u_1_0"] = row
    with pytest.raises(CertificateError, match=r"row u_1_0\)?: its receipts hold no generation"):
        step(make_verifier(), store.batch())
    store.rows["u_1_0"] = renamed(row, invalid=True, places=[])
    assert step(make_verifier(), store.batch())["unsampled"] == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("old_log_probs", 0.5), ("old_log_probs", -1e30), ("ref_log_prob", 0.5), ("rollout_is_weights", -0.1)],
)
def test_numbers_that_cannot_be_end_the_run(store: Store, name: str, value: float) -> None:
    from verl_multiturn import CertificateError

    for row in store.rows.values():
        row[name] = -row["rollout_log_probs"] if "weights" in name else row["rollout_log_probs"].clone()
    assert step(make_verifier(), store.batch())["violations"] == 0
    store.rows["u_1_0"][name][0] = value
    with pytest.raises(CertificateError, match=rf"row u_1_0.*turn 0.*{name} is .*, expected a finite number from"):
        step(make_verifier(), store.batch())


def test_verls_padding_rows(store: Store) -> None:
    import torch
    from verl.trainer.ppo.padding_utils import construct_minimal_padding_template

    from verl_multiturn import CertificateError

    source = next(iter(store.rows))
    row, tag = construct_minimal_padding_template(store.rows[source], store.tags[source], 0)
    row["advantages"] = row["old_log_probs"] = row["response_mask"].float()
    name = f"pad{uuid4().hex}"
    store.rows[f"{name}_0_0"], store.tags[f"{name}_0_0"] = {**row, "uid": name}, tag
    padding = store.rows[f"{name}_0_0"]
    for verifier in (make_verifier(), make_verifier(bypass_mode=True), make_verifier(data=MIXED)):
        assert step(verifier, store.batch())["rows"] == 5
    for column, value, what in (
        ("response_mask", torch.tensor([1]), "mask is 1"),
        ("loss_mask", torch.tensor([1]), "loss_mask is 1"),
        ("advantages", torch.full((1,), float("nan")), "advantages is nan"),
        ("advantages", torch.zeros(3), r"advantages column has shape \[3\]"),
        ("prompts", torch.arange(127), "one id throughout"),
    ):
        store.rows[f"{name}_0_0"] = {**padding, column: value}
        with pytest.raises(CertificateError, match=rf"row {name}_0_0.*{what}"):
            step(make_verifier(), store.batch())


def test_a_real_row_tagged_as_padding_ends_the_run(store: Store) -> None:
    from verl_multiturn import CertificateError

    row = store.rows["u_1_0"]
    for name in ("response_mask", "rollout_log_probs"):
        row[name] = row[name] * 0
    row["loss_mask"] = row["response_mask"]
    store.tags["u_1_0"]["is_padding"] = True
    with pytest.raises(CertificateError, match=r"row u_1_0.*: it is tagged as the trainer's filling"):
        step(make_verifier(), store.batch())


@pytest.mark.parametrize("name", ["old_log_probs", "ref_log_prob", "rollout_is_weights", "values", "returns"])
def test_what_the_loss_takes_is_finite(store: Store, name: str) -> None:
    from verl_multiturn import CertificateError

    for row in store.rows.values():
        row[name] = row["rollout_log_probs"].clone() * (-1 if "weights" in name else 1)
    verifier = make_verifier(critic=name in ("values", "returns"))
    assert step(verifier, store.batch())["violations"] == 0
    row = store.rows["u_2_0"]
    token = int((row["response_mask"] == 0).nonzero()[0])
    row[name][token] = float("nan")
    with pytest.raises(CertificateError, match=rf"row u_2_0.*token {len(row['prompts']) + token}: {name} is nan"):
        step(verifier, store.batch())
    row[name] = row[name][:-1]
    with pytest.raises(CertificateError, match=rf"row u_2_0.*the {name} column has shape"):
        step(verifier, store.batch())


def test_columns_in_bfloat16_can_be_read(store: Store) -> None:
    import torch

    for row in store.rows.values():
        row["old_log_probs"] = row["old_log_probs"].to(torch.bfloat16)
    assert step(make_verifier(), store.batch())["rows"] == 4


def test_bypass_mode_takes_the_engines_logprobs(store: Store) -> None:
    from verl_multiturn import CertificateError

    assert step(make_verifier(bypass_mode=True), store.batch())["violations"] == 0
    store.rows["u_1_0"]["old_log_probs"][0] -= 0.5
    assert step(make_verifier(), store.batch())["violations"] == 0
    with pytest.raises(CertificateError, match=r"row u_1_0.*old_log_probs is"):
        step(make_verifier(bypass_mode=True), store.batch())


def test_rows_that_took_the_engines_log_probs_have_them_to_the_bit(store: Store) -> None:
    from verl_multiturn import CertificateError
    from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows

    verifier, rows = make_verifier(), BatchRows(store.batch())
    store.rows["u_1_0"]["old_log_probs"][0] -= 1e-6
    others = [key for key in rows.keys if str(key) != "u_1_0"]
    verifier.verify(rows, 4, 0, (), others)
    with pytest.raises(CertificateError, match=r"row u_1_0.*old_log_probs is"):
        verifier.verify(rows, 4, 0, (), rows.keys)


def test_a_share_of_the_rows(store: Store) -> None:
    assert step(make_verifier(share=0.5), store.batch())["rows"] == 2
    assert step(make_verifier(share=0.0), store.batch())["rows"] == 0


def test_rejection_sampling_may_mask_rows(store: Store) -> None:
    from verl_multiturn import CertificateError

    row = store.rows["u_1_0"]
    row["response_mask"] = row["response_mask"] * 0
    assert step(make_verifier(rollout_rs="token_k1"), store.batch())["violations"] == 0
    # In bypass mode verl rejects within the loss, and writes no mask.
    bypass = make_verifier(rollout_rs="token_k1", bypass_mode=True)
    for verifier in (make_verifier(rollout_rs=None), bypass):
        with pytest.raises(CertificateError, match="mask is 0"):
            step(verifier, store.batch())


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


def test_cached_rollouts_are_refused_where_they_would_be_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.integration.test_refusals import ROLLOUT, composed
    from verl_multiturn import ConfigError
    from verl_multiturn.verl_bridge.startup import configuration

    monkeypatch.setattr(configuration, "config_hooks", [])
    cached = {"skip.rollout_tq.enable": "True", "ray_kwargs.ray_init.num_cpus": "64"}
    for mode in ("sync", "multiturn_sync"):
        with pytest.raises(ConfigError, match=r"skip\.rollout_tq\.enable=True: .*; set .*certificate_share=0"):
            configuration.prepare_config(composed(**cached, **{"trainer.v1.trainer_mode": mode}))
    configuration.prepare_config(composed(**cached, **{f"+{ROLLOUT}.custom.multiturn.certificate_share": "0"}))
    configuration.prepare_config(composed(**cached, **{"trainer.use_v1": "False"}))
