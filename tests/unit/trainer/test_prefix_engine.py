"""The prefix-tree engine gives verl's losses the values of verl's own FSDP2 engine, or leaves it to that engine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.warm_python import run_with_stack, stack_python

# Importing verl's engines warns about optional ones that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


@pytest.fixture(scope="module")
def kit() -> Iterator[Any]:
    from tests.support import training_engine

    yield training_engine
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def classes() -> tuple[type, type, type]:
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    from verl_multiturn.verl_bridge.prefix_tree.engine import PrefixTreeEngine, StrictPrefixTreeEngine

    return FSDPEngineWithLMHead, PrefixTreeEngine, StrictPrefixTreeEngine


@pytest.fixture(scope="module")
def model(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = kit.make_model(tmp_path_factory.mktemp("model"), "qwen3")
    return made


@pytest.fixture(scope="module")
def engines(kit: Any, classes: tuple[type, type, type], model: Path) -> tuple[Any, Any]:
    return kit.make_engine(classes[0], model), kit.make_engine(classes[2], model)


def agree(kit: Any, engines: tuple[Any, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Assert that both engines compute the same; return their metrics of the update."""
    columns = [kit.forward(engine, batch) for engine in engines]
    assert columns[0].keys() == columns[1].keys()
    assert kit.farthest(columns[0]["log_probs"], columns[1]["log_probs"]) <= 2e-5
    assert kit.farthest(columns[0]["entropy"], columns[1]["entropy"]) <= 2e-5
    loss = kit.make_loss(entropy_coeff=0.01, use_kl_loss=True)
    (verls, gradient), (ours, other) = (kit.backward(engine, batch, loss) for engine in engines)
    share, cosine = kit.gradients_differ(gradient, other)
    assert share <= 1e-5
    assert cosine >= 0.999999
    assert sum(ours["loss"]) == pytest.approx(sum(verls["loss"]), rel=1e-4, abs=1e-6)
    return verls, ours


@pytest.mark.parametrize("seed", range(3))
def test_random_forests_come_out_as_their_rows(kit: Any, engines: tuple[Any, Any], seed: int) -> None:
    agree(kit, engines, kit.make_batch(kit.random_rows(seed), seed, temperature=(1.0, 0.7, 1.3)[seed]))


def test_one_row_equal_rows_and_prefixes_of_others(kit: Any, engines: tuple[Any, Any]) -> None:
    agree(kit, engines, kit.make_batch(kit.as_rows([1, 2, 3, 4], prompt=2)))
    agree(
        kit, engines, kit.make_batch(kit.as_rows([1, 2, 3], [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4], [7, 8], prompt=1))
    )


def test_a_shared_token_that_one_row_alone_trains(kit: Any, engines: tuple[Any, Any]) -> None:
    shared = [11, 12, 13, 14]
    agree(kit, engines, kit.make_batch([([5, 6], [*shared, 20], [1] * 5), ([5, 6], [*shared, 30], [0, 0, 0, 0, 1])]))


def test_rows_of_different_temperatures_in_one_batch(kit: Any, engines: tuple[Any, Any]) -> None:
    rows = kit.as_rows([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 9, 9], prompt=2)
    agree(kit, engines, kit.make_batch(rows, temperature=torch.tensor([1.0, 0.5, 0.5])))


def test_micro_batches_count_the_tokens_of_their_forests(kit: Any, engines: tuple[Any, Any]) -> None:
    rows = kit.as_rows(*([1, 2, 3, 4, 5, 6, 7, 8, end] for end in range(10, 18)), prompt=8)
    verls, ours = agree(kit, engines, kit.make_batch(rows, micro_batch_size_per_gpu=2))
    assert (len(verls["loss"]), len(ours["loss"])) == (4, 1)  # 16 tokens in the forest, 18 in two rows
    verls, ours = agree(kit, engines, kit.make_batch(rows, use_dynamic_bsz=True, max_token_len_per_gpu=12))
    assert (len(verls["loss"]), len(ours["loss"])) == (8, 2)


def test_a_row_that_no_micro_batch_takes_is_refused(kit: Any, engines: tuple[Any, Any]) -> None:
    from verl_multiturn.errors import ConfigError

    batch = kit.make_batch(kit.as_rows([1] * 9, prompt=4), use_dynamic_bsz=True, max_token_len_per_gpu=8)
    with pytest.raises(ConfigError, match="a row has 9 tokens, and a micro-batch may have 8"):
        kit.forward(engines[1], batch)
    agree(kit, engines, kit.make_batch(kit.as_rows([1] * 9, prompt=4)))  # the engine is as it was


def test_activations_are_computed_again_in_the_forest(kit: Any, classes: tuple[type, type, type], model: Path) -> None:
    engines = tuple(kit.make_engine(kind, model, checkpointing=True) for kind in (classes[0], classes[2]))
    agree(kit, engines, kit.make_batch(kit.random_rows(5)))


def test_an_update_may_come_first(kit: Any, classes: tuple[type, type, type], model: Path) -> None:
    batch, loss = kit.make_batch(kit.random_rows(6)), kit.make_loss()
    gradients = [kit.backward(kit.make_engine(kind, model), batch, loss)[1] for kind in (classes[0], classes[2])]
    assert kit.gradients_differ(*gradients)[0] <= 1e-5


def test_a_thousand_twigs_are_few_calls() -> None:
    import numpy as np

    from verl_multiturn.verl_bridge.prefix_tree.attention import ForestLayout, gathered
    from verl_multiturn.verl_bridge.prefix_tree.forest import grow

    rows = [np.array([*range(300), 1000 + i, i], dtype=np.int64) for i in range(1000)]
    segments = grow(rows).segments
    assert len(segments) == 1000
    parts = gathered(segments)
    assert sum(len(part) for part in parts) == 1000
    assert len(parts) < 100
    forest = grow(rows[:3])
    (block,) = ForestLayout(forest, "cpu").blocks
    added = block.mask(torch.float32)
    assert added is not None
    assert added.shape == (306, 306)
    assert [int((row == 0).sum()) for row in added[300:]] == [301, 302, 301, 302, 301, 302]


def test_one_call_of_variable_lengths_is_the_same(
    kit: Any, engines: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn.verl_bridge.prefix_tree import attention

    calls = []

    def varlen(
        q: Any, k: Any, v: Any, at: Any, k_at: Any, most: int, k_most: int, softmax_scale: Any, causal: bool
    ) -> Any:
        """Act as flash-attn's function of this form: the last query sees the last key."""
        assert causal
        calls.append(len(at) - 1)
        outputs = []
        for (start, end), (first, last) in zip(pairwise(at.tolist()), pairwise(k_at.tolist()), strict=True):
            assert end - start <= most
            assert last - first <= k_most
            mask = torch.ones(end - start, last - first, dtype=torch.bool).tril(last - first - (end - start))
            each = [x.transpose(0, 1) for x in (q[start:end], k[first:last], v[first:last])]
            found = torch.nn.functional.scaled_dot_product_attention(
                *each, attn_mask=mask, scale=softmax_scale, enable_gqa=True
            )
            outputs.append(found.transpose(0, 1))
        return torch.cat(outputs)

    monkeypatch.setattr(attention, "varlen_attention", lambda query: varlen)
    monkeypatch.setattr(attention, "_halved", lambda each: each)
    agree(kit, engines, kit.make_batch(kit.random_rows(7)))
    assert calls


def test_flash_attn_gets_the_precision_that_it_computes_in() -> None:
    from verl_multiturn.verl_bridge.prefix_tree.attention import _halved

    halved = [_halved(torch.zeros(1, dtype=each)) for each in (torch.float32, torch.bfloat16, torch.float16)]
    assert [each.dtype for each in halved] == [torch.get_autocast_dtype("cpu"), torch.bfloat16, torch.float16]


def test_what_cannot_be_exact_is_left_to_verl_and_told_once(
    kit: Any, classes: tuple[type, type, type], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from verl_multiturn.errors import ConfigError

    window = kit.make_model(tmp_path, use_sliding_window=True, sliding_window=4, max_window_layers=0)
    batch = kit.make_batch(kit.random_rows(0))
    plain, ours = (kit.make_engine(kind, window) for kind in classes[:2])
    capsys.readouterr()
    for _ in range(2):
        columns = [kit.forward(engine, batch)["log_probs"] for engine in (plain, ours)]
        assert torch.equal(columns[0].values(), columns[1].values())
    told = "verl-multiturn: no prefix trees in training, because of layers of sliding_attention\n"
    assert capsys.readouterr().err.count(told) == 1
    with pytest.raises(ConfigError, match="prefix_tree=on cannot be used with layers of sliding_attention; set"):
        kit.forward(kit.make_engine(classes[2], window), batch)


def test_a_probe_finds_what_no_configuration_says(
    kit: Any,
    classes: tuple[type, type, type],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from verl_multiturn.verl_bridge.prefix_tree import attention

    right = attention._attend_block
    monkeypatch.setattr(
        attention, "_attend_block", lambda query, key, value, block, scale: right(query, key, value, block, 1.0)
    )
    plain, ours = (kit.make_engine(kind, model) for kind in classes[:2])
    batch = kit.make_batch(kit.random_rows(0))
    columns = [kit.forward(engine, batch)["log_probs"] for engine in (plain, ours)]
    assert torch.equal(columns[0].values(), columns[1].values())
    assert "no prefix trees in training, because of a model whose probe differs by" in capsys.readouterr().err


def test_a_probe_that_is_no_number_is_left_to_verl(
    kit: Any,
    classes: tuple[type, type, type],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from verl_multiturn.verl_bridge.prefix_tree import attention

    right = attention._attend_block
    monkeypatch.setattr(attention, "_attend_block", lambda *given: right(*given) * float("nan"))
    columns = kit.forward(kit.make_engine(classes[1], model), kit.make_batch(kit.random_rows(0)))
    assert not columns["log_probs"].values().isnan().any()
    assert "because of a model whose probe differs by inf" in capsys.readouterr().err


@pytest.mark.parametrize("takes", [True, False])
def test_a_model_that_hands_no_forest_down_is_left_to_verl(
    kit: Any, classes: tuple[type, type, type], model: Path, capsys: pytest.CaptureFixture[str], takes: bool
) -> None:
    from verl_multiturn.verl_bridge.prefix_tree.attention import FOREST

    engine = kit.make_engine(classes[1], model)
    verls = engine.module.forward

    def forward(**given: Any) -> Any:
        if not takes and FOREST in given:
            raise TypeError(f"forward() got an unexpected keyword argument {FOREST!r}")
        return verls(**{name: value for name, value in given.items() if name != FOREST})

    engine.module.forward = forward
    batch = kit.make_batch(kit.random_rows(0))
    columns = [kit.forward(each, batch)["log_probs"] for each in (engine, kit.make_engine(classes[0], model))]
    assert torch.equal(columns[0].values(), columns[1].values())
    assert "because of a model that does not hand further arguments down to its attention" in capsys.readouterr().err


def test_attention_that_asks_for_a_tensor_of_sinks_is_refused() -> None:
    from verl_multiturn.verl_bridge.prefix_tree.attention import _beyond

    given = {"scaling": 0.5, "sliding_window": None, "output_attentions": False}
    assert _beyond(torch.nn.Identity(), given) is None
    assert _beyond(torch.nn.Identity(), {**given, "s_aux": torch.zeros(4)}) == "attention with s_aux"


def test_a_batch_of_distillation_is_left_to_verl(kit: Any, classes: tuple[type, type, type]) -> None:
    from verl_multiturn.verl_bridge.prefix_tree.support import unfit_batch

    assert unfit_batch({}) is None
    assert unfit_batch({"distillation_use_topk": True}) == "top-k distillation"
    assert unfit_batch({"rope_dimensions": 2}) == "positions of several dimensions"


def normalized(kit: Any) -> Any:
    """Return REINFORCE's loss with weights that verl divides by their mean over a micro-batch."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.workers.config.actor import PolicyLossConfig

    correction = RolloutCorrectionConfig(
        loss_type="reinforce", rollout_is="token", rollout_is_batch_normalize=True, bypass_mode=True
    )
    return kit.make_loss(policy_loss=PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=correction))


def test_a_loss_that_depends_on_its_micro_batches_is_left_to_verl(
    kit: Any, engines: tuple[Any, Any], classes: tuple[type, type, type], model: Path
) -> None:
    from verl_multiturn.errors import ConfigError
    from verl_multiturn.verl_bridge.prefix_tree.support import unfit_loss

    fit, unfit = ("vanilla", "gspo", "mt_gspo", "dro", "bypass_mode"), ("geo_mean", "kl_cov", "of a user")
    told = [unfit_loss(kit.make_loss(mode).keywords["config"]) for mode in (*fit, *unfit)]
    assert told == [None] * len(fit) + [f"loss_mode={mode}, which may depend on the micro-batches" for mode in unfit]
    batch = kit.make_batch(kit.as_rows(*([1, 2, 3, end] for end in range(4, 8)), prompt=2), micro_batch_size_per_gpu=1)
    norm = {"loss_agg_mode": "seq-mean-token-sum-norm"}
    assert unfit_loss(kit.make_loss(**norm, loss_scale_factor=9).keywords["config"]) is None
    for loss in (kit.make_loss("geo_mean"), kit.make_loss(**norm), normalized(kit)):
        found = [kit.backward(engine, batch, loss) for engine in (engines[0], kit.make_engine(classes[1], model))]
        assert [len(output["loss"]) for output, _ in found] == [4, 4]
        assert kit.gradients_differ(found[0][1], found[1][1])[0] <= 1e-5
        with pytest.raises(ConfigError, match=r"depends? on the micro-batches; set"):
            kit.backward(engines[1], batch, loss)


def test_verl_finds_the_engines_by_their_vendors(
    classes: tuple[type, type, type], monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.workers.engine import EngineRegistry

    for device in ("cuda", "npu"):
        monkeypatch.setenv("VERL_ENGINE_DEVICE", device)
        for vendor, kind in zip(("another", "verl_multiturn", "verl_multiturn_strict"), classes, strict=True):
            monkeypatch.setenv("VERL_ENGINE_VENDOR", vendor)
            assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is kind


def test_an_npu_is_left_to_verl(
    kit: Any, classes: tuple[type, type, type], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_multiturn.errors import ConfigError
    from verl_multiturn.verl_bridge.prefix_tree import engine

    ours = kit.make_engine(classes[2], model)
    monkeypatch.setattr(engine, "get_device_name", lambda: "npu")
    with pytest.raises(ConfigError, match="prefix_tree=on cannot be used with an NPU, on which they were never tried;"):
        kit.forward(ours, kit.make_batch(kit.random_rows(0)))


def compare_on_rank(rank: int, store: str, model: str) -> None:
    """Compare both engines as one of two ranks: the rows of the first one are one tree, the other's share nothing."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    from tests.support import training_engine as kit
    from verl_multiturn.verl_bridge.prefix_tree.engine import StrictPrefixTreeEngine

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(store, 2), rank=rank, world_size=2)
    engines = [kit.make_engine(kind, Path(model)) for kind in (FSDPEngineWithLMHead, StrictPrefixTreeEngine)]
    rows = [[*range(1, 9), end] if rank == 0 else [10 * end + i for i in range(9)] for end in range(1, 9)]
    batch = kit.make_batch(kit.as_rows(*rows, prompt=8), rank, micro_batch_size_per_gpu=2, global_batch_size=16)
    columns = [kit.forward(engine, batch) for engine in engines]
    assert kit.farthest(columns[0]["log_probs"], columns[1]["log_probs"]) <= 2e-5
    (verls, gradient), (ours, other) = (kit.backward(engine, batch, kit.make_loss()) for engine in engines)
    # The first rank needs one alone.
    assert (len(verls["loss"]), len(ours["loss"])) == (4, 4)
    share, cosine = kit.gradients_differ(gradient, other)
    assert share <= 1e-5
    assert cosine >= 0.999999
    assert sum(ours["loss"]) == pytest.approx(sum(verls["loss"]), rel=1e-4, abs=1e-6)
    torch.distributed.destroy_process_group()


def test_two_ranks_have_equally_many_micro_batches_and_verls_gradient(model: Path, tmp_path: Path) -> None:
    run, given = f"from {__name__} import compare_on_rank as run", (str(tmp_path / "store"), str(model))
    stack_python()  # one for both
    with ThreadPoolExecutor() as pool:
        ranks = list(pool.map(lambda rank: run_with_stack("-c", f"{run}; run({rank}, *{given})"), range(2)))
    assert [rank.returncode for rank in ranks] == [0, 0], [rank.stderr[-2000:] for rank in ranks]


def test_every_loss_has_the_same_gradient(kit: Any, engines: tuple[Any, Any]) -> None:
    from benchmarks.prefix_tree import AGGREGATIONS, as_loss, terms

    batch = kit.make_batch(kit.random_rows(8, most=12))
    for number, (name, term) in enumerate(terms().items()):
        loss = as_loss(term, AGGREGATIONS[number % len(AGGREGATIONS)])
        share, cosine = kit.gradients_differ(*(kit.backward(engine, batch, loss)[1] for engine in engines))
        assert share <= 1e-5, name
        assert cosine >= 0.999999, name


def test_ratios_of_turns_are_the_same_in_forests_in_rows_and_in_micro_batches(
    kit: Any, engines: tuple[Any, Any]
) -> None:
    made = kit.as_rows(*([*range(1, 8), 20 + end, end] for end in range(30, 36)), prompt=3)
    rows = [(prompt, response, [1, 1, 0, 1, 1, 1]) for prompt, response, _ in made]
    loss = kit.make_loss("mt_gspo", loss_agg_mode="seq-mean-token-mean", clip_ratio_low=0.2, clip_ratio_high=0.2)
    found = [
        kit.backward(engine, kit.make_batch(rows, micro_batch_size_per_gpu=size), loss)
        for engine in engines
        for size in (1, 2, 6)
    ]
    assert [len(output["loss"]) for output, _ in found] == [6, 3, 1, 6, 2, 1]
    for output, gradient in found[1:]:
        assert kit.gradients_differ(found[0][1], gradient)[0] <= 1e-5
        assert sum(output["loss"]) == pytest.approx(sum(found[0][0]["loss"]), rel=1e-4, abs=1e-6)
    of_rows = kit.backward(engines[0], kit.make_batch(rows), kit.make_loss("gspo", loss_agg_mode="seq-mean-token-mean"))
    assert kit.gradients_differ(found[0][1], of_rows[1])[0] > 1e-3
