"""A teacher's columns of every row: verl's own, a loss of 0 where teacher and student are one, and exact gradients."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

# Importing verl's engines warns about optional ones that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

MODES: list[dict[str, Any]] = [
    {"loss_mode": "k3", "use_task_rewards": False},
    {"loss_mode": "k1", "use_task_rewards": False, "use_policy_gradient": True},
    {"loss_mode": "forward_kl_topk", "topk": 8, "use_task_rewards": False},
]


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    from tests.support import teachers, training_engine
    from verl_multiturn.verl_bridge.prefix_tree.engine import PrefixTreeEngine

    folder = tmp_path_factory.mktemp("models")
    student, other = (training_engine.make_model(folder / str(seed), "qwen3", seed) for seed in (0, 1))
    engines = [training_engine.make_engine(kind, student) for kind in (FSDPEngineWithLMHead, PrefixTreeEngine)]
    clients = [teachers.ModelClient(each) for each in (student, other)]
    yield SimpleNamespace(**{**vars(training_engine), **vars(teachers), "engines": engines, "clients": clients})
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


async def taught(kit: Any, mode: dict[str, Any], client: Any, rows: Any, **flags: Any) -> tuple[Any, Any]:
    """Return a batch of rows with a teacher's columns, and verl's flags of the loss; and the configuration."""
    config = kit.teaching(**mode)
    columns = await kit.ask(kit.worker_of(config, client), rows)
    if mode["loss_mode"] == "forward_kl_topk":
        flags |= {"distillation_use_topk": True, "distillation_only": not mode.get("use_policy_gradient", False)}
        flags |= {"calculate_entropy": False}
    return kit.with_columns(kit.make_batch(rows, **flags), columns), config


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode["loss_mode"])
async def test_a_teacher_that_is_the_student_has_nothing_to_say(kit: Any, mode: dict[str, Any]) -> None:
    """The benchmark `distillation` has 100 forests, and every loss."""
    for seed in range(2):
        batch, config = await taught(kit, mode, kit.clients[0], kit.random_rows(seed), micro_batch_size_per_gpu=2)
        for engine in kit.engines:
            output, gradient = kit.backward(engine, batch, kit.loss_of(config))
            assert sum(output["loss"]) == pytest.approx(0.0, abs=1e-6)
            if mode["loss_mode"] == "k3":  # its derivative is 0 there, too
                assert max(float(each.abs().max()) for each in gradient.values()) < 1e-5


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode["loss_mode"])
async def test_common_prefixes_computed_once_give_verls_loss_and_gradient(kit: Any, mode: dict[str, Any]) -> None:
    batch, config = await taught(kit, mode, kit.clients[1], kit.random_rows(4))
    (verls, gradient), (ours, other) = (kit.backward(each, batch, kit.loss_of(config)) for each in kit.engines)
    assert abs(sum(verls["loss"])) > 1e-3
    assert sum(ours["loss"]) == pytest.approx(sum(verls["loss"]), rel=1e-4, abs=1e-6)
    share, cosine = kit.gradients_differ(gradient, other)
    assert share <= 1e-5
    assert cosine >= 0.999999
    assert ours["metrics"].keys() == verls["metrics"].keys()


async def test_each_row_gets_what_verl_asks_for_a_conversation_of_that_row_alone(kit: Any) -> None:
    for mode in (MODES[0], MODES[2]):
        rows = kit.random_rows(7)
        config = kit.teaching(**mode)
        worker = kit.worker_of(config, kit.clients[1])
        columns = await kit.ask(worker, rows)
        for (prompt, response, _), found in zip(rows, columns, strict=True):
            verls = kit.row_output(prompt, response)
            await kit.VERLS_WORKER._compute_teacher_logprobs(worker, verls, prompt, response, False, {})
            for name in ("teacher_ids", "teacher_logprobs"):
                assert torch.equal(found[name], verls.extra_fields[name])
                assert found[name].dtype == verls.extra_fields[name].dtype


async def test_a_micro_batch_of_which_nothing_is_trained_adds_nothing(kit: Any) -> None:
    """Where verl raises; it adds rows that are not trained to the batches of any run with several rows."""
    from verl.trainer.distillation import distillation_ppo_loss

    trained = kit.random_rows(1)
    masked = [(prompt, response, [0] * len(response)) for prompt, response, _ in kit.random_rows(2)[:3]]
    for mode in (MODES[0], {**MODES[0], "use_task_rewards": True}, MODES[2]):
        sizes = {"micro_batch_size_per_gpu": 1, "global_batch_size": len(trained) + len(masked)}
        whole, config = await taught(kit, mode, kit.clients[1], [*trained, *masked], **sizes)
        part = kit.tu.index_select_tensor_dict(whole, list(range(len(trained))))
        loss = kit.loss_of(config)
        verls = kit.engines[0]
        with pytest.raises(RuntimeError, match="min"), verls.eval_mode(), torch.no_grad():
            verls.forward_backward_batch(whole.clone(), kit.loss_of(config, distillation_ppo_loss), forward_only=True)
        (expected, gradient), (found, other) = (kit.backward(verls, each, loss) for each in (part, whole))
        assert gradient.keys() == other.keys()
        assert all(torch.equal(gradient[name], other[name]) for name in gradient)
        assert found["loss"][len(trained) :] == [0.0] * len(masked)
        assert found["loss"][: len(trained)] == expected["loss"]
        for name in ("distillation/loss_min", "distillation/loss_max", "distillation/loss"):
            assert found["metrics"][name].aggregate() == pytest.approx(expected["metrics"][name].aggregate())
        lengths = {len(each.values) for each in found["metrics"].values() if hasattr(each, "values")}
        assert lengths == {len(trained) + len(masked)}, "verl joins the metrics of equally many micro-batches"
