"""The certificate of a large batch, in processes of a real Ray that share the rows."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import has_ended
from tests.integration.test_joining import add
from tests.integration.trainer_rows import WritableStore, make_trainer, put_in_place, step
from verl_multiturn.records.read.records import Records

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [
    pytest.mark.stack,
    pytest.mark.deaths,
    pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning"),
]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> WritableStore:
    """Return a batch of two groups within this process, whose size is large."""
    from verl_multiturn.verl_bridge.certificate import parts

    made = WritableStore()
    put_in_place(made, monkeypatch)
    monkeypatch.setattr(parts, "LARGE", 8)
    for uid in "uv":
        add(made, uid, [1.0, 0.0, None, 1.0])
    return made


def parts_of(code: type, hung_s: float = 300.0, count: int = 3) -> Any:
    from verl_multiturn.verl_bridge.certificate.parts import Parts

    return Parts(count, hung_s, code)


def faulty(fault: str) -> type:
    """Return the code of parts of which the one with the row `v_0_0` has a fault; when parts hang, all of them do."""
    from verl_multiturn.verl_bridge.certificate.part import RowVerdict

    class Faulty:
        def check(self, rows: Any, *rest: Any) -> Any:
            given = [RowVerdict(row.key, []) for row in rows]
            if fault == "hangs":
                time.sleep(600)
            if "v_0_0" not in [str(row.key) for row in rows]:
                return given
            if fault == "dies":
                os._exit(1)
            if fault == "fails":
                raise OSError("no route to the storage")
            return {"fewer": given[1:], "twice": [*given, given[0]]}[fault]

        def columns(self) -> list[Any]:
            return []

    return Faulty


@pytest.mark.parametrize(
    ("fault", "mode", "what"),
    [
        ("dies", "sync", r"failed: ActorDiedError"),
        ("dies", "separate_async", r"failed: ActorDiedError"),
        ("fails", "sync", r"failed: .*OSError.*no route to the storage"),
        ("fewer", "colocate_async", r"answered with 1 verdicts, on 1 of its rows and 0 others"),
        ("twice", "sync", r"answered with 3 verdicts, on 2 of its rows and 0 others"),
    ],
)
def test_a_part_that_gives_no_verdict_ends_the_run(
    cluster: None, store: WritableStore, fault: str, mode: str, what: str
) -> None:
    from verl_multiturn import CertificateError

    trainer = make_trainer(mode)
    trainer._verifier._parts = parts_of(faulty(fault), count=4)
    named = rf"step 4: part 3 of 4 of the certificate, with the 2 rows from v_0_0 to v_1_0, .*{what}.*not trained on"
    with pytest.raises(CertificateError, match=f"(?s){named}"):
        step(trainer, store.batch())
    assert trainer.updates == [], "it was trained unchecked"


def test_an_answer_is_one_verdict_on_each_row_in_order() -> None:
    from verl_multiturn.rows.keys import RowKey
    from verl_multiturn.verl_bridge.certificate.part import RowVerdict, TrainerRow
    from verl_multiturn.verl_bridge.certificate.parts import _difference

    keys = [RowKey.parse(f"u_{session}_0") for session in range(2)]
    asked = [TrainerRow(key, 3, 3, False, False, False) for key in keys]
    given = [RowVerdict(key, []) for key in keys]
    assert _difference(asked, given) is None
    assert _difference(asked, None) == "answered with what is no list of verdicts: None"
    assert _difference(asked, [*given, None]).startswith("answered with what is no list of verdicts: [Row")
    other = RowVerdict(RowKey.parse("w_0_0"), [])
    for wrong, count, own, others in (
        ([], 0, 0, 0),
        (given[1:], 1, 1, 0),
        ([*given, given[0]], 3, 2, 0),
        (given[:1] * 2, 2, 1, 0),
        (given[::-1], 2, 2, 0),
        ([given[0], other], 2, 1, 1),
    ):
        said = f"answered with {count} verdicts, on {own} of its rows and {others} others"
        assert _difference(asked, wrong) == said


def test_a_part_that_hangs_ends_the_run(cluster: None, store: WritableStore) -> None:
    from verl_multiturn import CertificateError

    trainer = make_trainer()
    trainer._verifier._parts = parts_of(faulty("hangs"), hung_s=1.0, count=2)
    named = "part 1 of 2 of the certificate, with the 4 rows from u_0_0 to u_3_0, has not answered for 1 s; the batch"
    with pytest.raises(CertificateError, match=f"{named} is not trained on"):
        step(trainer, store.batch())
    assert trainer.updates == [], "it was trained unchecked"


def test_the_same_parts_without_a_fault(cluster: None, store: WritableStore) -> None:
    trainer = make_trainer()
    trainer._verifier._parts = parts_of(faulty("none of them"), count=9)  # more than there are rows
    store.rows = {key: row for key, row in store.rows.items() if key != "v_0_0"}
    store.tags.pop("v_0_0")
    add(store, "w", [1.0, 0.0])
    assert step(trainer, store.batch())["rollout/certificate/rows"] == 9
    assert len(trainer.updates) == 1


def test_small_batches_and_those_outside_ray_stay_with_the_trainer(store: WritableStore) -> None:
    from verl_multiturn.verl_bridge.certificate.parts import Parts

    assert not Parts(1).are_worth(10_000), "on one core nothing is won"
    assert not Parts(2).are_worth(7)
    trainer = make_trainer()
    trainer._verifier._parts = parts_of(faulty("dies"))
    batch = store.batch([key for key in store.rows if key != "u_3_0"])
    assert step(trainer, batch)["rollout/certificate/rows"] == 7


@pytest.mark.parametrize(
    ("share", "rows", "count"), [(1.0, 8, 2), (1.0, 7, 0), (0.5, 15, 2), (0.5, 14, 0), (0.0, 99, 0)]
)
def test_parts_are_started_for_large_batches(
    cluster: None, store: WritableStore, share: float, rows: int, count: int
) -> None:
    trainer = make_trainer(actor_rollout_ref__rollout__custom__multiturn__certificate_share=share)
    trainer._verifier._parts = parts_of(faulty("none"), count=2)
    trainer._verifier.start(rows)
    assert len(trainer._verifier._parts._actors) == count


def test_parts_end_with_their_trainer_and_reserve_nothing(cluster: None) -> None:
    import ray

    class Part:
        def pid(self) -> int:
            return os.getpid()

    before = ray.available_resources().get("CPU")
    parts = parts_of(Part)
    parts.start()
    parts.start()
    processes = [psutil.Process(pid) for pid in ray.get([actor.pid.remote() for actor in parts._actors])]
    assert len(set(processes)) == 3
    assert ray.available_resources().get("CPU") == before
    del parts
    until = time.monotonic() + 60
    while not all(map(has_ended, processes)) and time.monotonic() < until:
        time.sleep(0.05)
    assert all(map(has_ended, processes))


def test_the_code_of_the_parts_shares_nothing_with_what_builds_rows() -> None:
    program = (
        "import sys, verl_multiturn.verl_bridge.certificate.parts\n"
        "print([name for name in sys.modules if name in ('verl', 'sglang', 'transformers') or "
        "name.startswith(('verl_multiturn.rollout.trajectory', 'verl_multiturn.verl_bridge.loops'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.fixture(scope="module")
def queue(cluster: None) -> Iterator[Any]:
    """Start a TransferQueue, which the parts find by themselves."""
    import transfer_queue
    from omegaconf import OmegaConf

    units = {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 1}}
    transfer_queue.init(OmegaConf.create({"backend": units}))
    yield transfer_queue
    transfer_queue.close()


def put(queue: Any, rows: dict[str, dict[str, Any]], tags: dict[str, dict[str, Any]]) -> Any:
    """Write rows as verl's worker does, in the place of those before; return them as verl's batch."""
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    if known := list((queue.kv_list("train") or {}).get("train", {})):
        queue.kv_clear(keys=known, partition_id="train")
    names = list(rows)
    fields = list_of_dict_to_tensordict(list(rows.values()))
    return queue.kv_batch_put(keys=names, partition_id="train", fields=fields, tags=[tags[name] for name in names])


def conversations(count: int) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return rows and tags of honest conversations of several rows."""
    import torch

    from tests.long.tokens.certificate_parts import fields_of
    from tests.long.tokens.row_conversations import honest

    rows, tags = {}, {}
    for sample in [sample for seed in range(count) for sample in honest(seed)]:
        name = str(sample.row.key)
        fields = fields_of(sample.row, sample.receipts)
        rows[name] = {key: each if isinstance(each, str) else torch.tensor(each) for key, each in fields.items()}
        tags[name] = {"min_global_steps": sample.row.min_version, "max_global_steps": sample.row.max_version}
    return rows, tags


@pytest.fixture
def verifier(queue: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a certificate that checks eight rows and more in three parts, of a run with roles."""
    from tests.long.tokens.row_conversations import TRAINED
    from verl_multiturn.verl_bridge.certificate import parts

    monkeypatch.setattr(parts, "LARGE", 8)
    made = make_trainer()._verifier
    made._parts, made._trained = parts_of(parts.CertificatePart), TRAINED
    return made


def verify(verifier: Any, batch: Any, *names: str) -> Any:
    from verl_multiturn.verl_bridge.trainer.rows.batch_rows import BatchRows

    verifier.begin_step()
    return verifier.verify(BatchRows(batch), 4, 0, names)


def test_parts_read_the_queue_and_find_what_the_trainer_finds(
    queue: Any, verifier: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn import CertificateError
    from verl_multiturn.verl_bridge.certificate import parts

    rows, tags = conversations(9)
    fetched = verify(verifier, put(queue, rows, tags), "advantages", "no_such_column")
    metrics = verifier.metrics()
    assert metrics["rollout/certificate/rows"] == len(rows) > 16
    assert metrics["rollout/certificate/violations"] == metrics["rollout/certificate/unverified"] == 0
    columns = fetched.get()
    assert [str(key) for key in columns] == list(rows)
    assert fetched.keys == columns.keys()
    for key, fields in columns.items():
        assert list(fields) == ["advantages"]
        assert fields["advantages"].tolist() == rows[str(key)]["advantages"].tolist()

    name = list(rows)[-2]
    rows[name]["advantages"][0] = float("nan")
    rows[name]["rollout_log_probs"][1] -= 1.0
    said = []
    for large in (8, 10_000):
        monkeypatch.setattr(parts, "LARGE", large)
        with pytest.raises(CertificateError, match=rf"2 violations in {len(rows)} rows.*\n.*row {name}") as raised:
            verify(verifier, put(queue, rows, tags))
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_what_lies_in_different_parts_is_seen_together(queue: Any, verifier: Any) -> None:
    from tests.integration.test_certificate import renamed
    from verl_multiturn import CertificateError

    rows, tags = conversations(9)
    first = next(iter(rows))
    uid, session, _ = first.rsplit("_", 2)
    # The first row under a second name: its copy comes last, and so lies in the last part.
    other = f"{uid}_{int(session) + 1000}_0"
    twice = {**rows, other: renamed(rows[first], session_id=int(session) + 1000)}
    with pytest.raises(CertificateError, match=f"it is in the batch as '{first}' and as '{other}'"):
        verify(verifier, put(queue, twice, {**tags, other: tags[first]}))
    # A conversation whose rows lie in the first and in the last part, and one of whose rows is missing.
    own = [name for name in rows if name.startswith(f"{uid}_{session}_")]
    apart = {name: row for name, row in rows.items() if name not in own[1:]} | {name: rows[name] for name in own[1:]}
    verify(verifier, put(queue, apart, tags))
    del apart[own[-1]]
    with pytest.raises(CertificateError, match=rf"\(rows {uid}_{session}_\*\): "):
        verify(verifier, put(queue, apart, tags))
    batch = put(queue, rows, tags)
    batch.keys.append(first)
    batch.tags.append(tags[first])
    with pytest.raises(CertificateError, match=f"row {first}: it is 2 times in the batch"):
        verify(verifier, batch)


def test_the_join_of_a_batch_in_parts_is_that_of_one_that_the_trainer_checks(
    queue: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn.verl_bridge.certificate import parts

    store = WritableStore()
    for uid in "uv":
        add(store, uid, [1.0, 0.0, None, 1.0])
    for row in store.rows.values():
        del row["advantages"]  # verl computes them
    joins = []
    for large in (8, 10_000):
        monkeypatch.setattr(parts, "LARGE", large)
        folder = tmp_path / str(large)
        trainer = make_trainer(actor_rollout_ref__rollout__custom__multiturn__record_dir=str(folder))
        trainer._verifier._parts = parts_of(parts.CertificatePart)
        step(trainer, put(queue, store.rows, store.tags))
        trainer._joining._writer.close()
        assert bool(trainer._verifier._parts._actors) == (large == 8)
        joins += [table.to_pylist() for _, table in Records(folder).joins()]
    assert joins[0] == joins[1]
    assert len(joins[0]) == 8
    assert all(row["advantages"] and row["old_log_probs"] and row["entropy"] for row in joins[0])
