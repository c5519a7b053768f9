"""Attention on the CPU: the same as SGLang's own for every batch, less work where slots are shared, or SGLang's own."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import verl  # noqa: F401  # first: its plugin turns the CPU platform on
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tests.integration.test_refusals import composed
from verl_multiturn.cpu import attention
from verl_multiturn.cpu.attention import SharedPrefixAttention, plan
from verl_multiturn.cpu.defaults import ATTENTION, fill_in

pytestmark = pytest.mark.stack

_SLOTS = 4096
_SGLANG = "actor_rollout_ref.rollout.engine_kwargs.sglang"


class Pool:
    """Keys and values of each slot, between -1 and 1."""

    def __init__(self, heads: int, numbers: int, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.buffers = [(torch.rand(_SLOTS, heads, numbers, generator=generator) * 2 - 1).to(dtype) for _ in range(2)]

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.buffers[0]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.buffers[1]

    def set_kv_buffer(self, layer: Any, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        for buffer, new in zip(self.buffers, (k, v), strict=True):
            buffer[slots] = new.view(-1, *buffer.shape[1:]).to(buffer.dtype)


class Batch:
    """Holds the attributes of SGLang's `ForwardBatch` that attention reads."""

    spec_info: Any = None

    def __init__(self, slots: list[list[int]], before: list[int], pool: Pool) -> None:
        self.token_to_kv_pool = pool
        self.forward_mode = ForwardMode.EXTEND
        rows = torch.randperm(len(slots) + 3, generator=torch.Generator().manual_seed(len(slots)))[: len(slots)]
        table = torch.randint(0, _SLOTS, (len(slots) + 3, 512), dtype=torch.int32)  # a row's rest has anything
        for row, own in zip(rows.tolist(), slots, strict=True):
            table[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
        self.req_to_token_pool = type("Table", (), {"req_to_token": table})
        self.req_pool_indices = rows
        self.seq_lens = torch.tensor([len(own) for own in slots])
        self.extend_prefix_lens = torch.tensor(before, dtype=torch.int32)
        self.extend_seq_lens = (self.seq_lens - self.extend_prefix_lens).int()
        self.out_cache_loc = torch.tensor([slot for own, k in zip(slots, before, strict=True) for slot in own[k:]])


def layer_of(heads: int, kv_heads: int, numbers: int) -> RadixAttention:
    return RadixAttention(heads, numbers, numbers**-0.5, kv_heads, layer_id=0)


def pieces_of(backend: SharedPrefixAttention) -> Any:
    """Return the last plan of a backend."""
    return backend._planned and backend._planned[2]


def outputs(
    batch: Batch, layer: RadixAttention, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, SharedPrefixAttention]:
    """Return the outputs of SGLang's backend and ours for random queries and new keys and values, and our backend."""
    generator = torch.Generator().manual_seed(seed)
    tokens = len(batch.out_cache_loc)

    def new(heads: int) -> torch.Tensor:
        return (torch.rand(tokens, heads * layer.qk_head_dim, generator=generator) * 2 - 1).to(dtype)

    q, k, v = new(layer.tp_q_head_num), new(layer.tp_k_head_num), new(layer.tp_k_head_num)
    runner: Any = type("Runner", (), {"device": "cpu"})
    before = [buffer.clone() for buffer in batch.token_to_kv_pool.buffers]
    found = []
    for backend in (TorchNativeAttnBackend(runner), SharedPrefixAttention(runner)):
        for buffer, kept in zip(batch.token_to_kv_pool.buffers, before, strict=True):
            buffer.copy_(kept)
        method = backend.forward_decode if batch.forward_mode.is_decode() else backend.forward_extend
        found.append(method(q, k, v, layer, batch))
        found.append(torch.stack([buffer.float() for buffer in batch.token_to_kv_pool.buffers]))
    assert torch.equal(found[1], found[3])  # both have written the new keys and values
    return found[0], found[2], backend


@st.composite
def batches(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> tuple[Batch, RadixAttention]:
    """Draw requests that share a first part with all, a second with their group, or nothing, in either mode."""
    kv_heads, each = draw(st.sampled_from([(4, 1), (2, 2), (1, 6), (2, 7)]))
    numbers = draw(st.sampled_from([8, 32]))
    seed = draw(st.integers(0, 2**31))
    number = draw(st.integers(1, 8) | st.integers(1, 128))
    system, grouped = draw(st.sampled_from([0, 1, 40])), draw(st.sampled_from([0, 3, 50]))
    longest = draw(st.sampled_from([1, 30, 200]))
    decode, shuffled = draw(st.booleans()), draw(st.booleans())
    random = np.random.default_rng(seed)

    def fresh(count: int) -> list[int]:
        return random.integers(0, _SLOTS, count).tolist()

    first, groups = fresh(system), [fresh(grouped) for _ in range(1 + number // 8)]
    slots, before = [], []
    for request in range(number):
        part = [] if random.random() < 0.1 else [*first, *groups[request % len(groups)]]
        length = longest if random.random() < 0.1 else int(random.integers(1, 1 + max(1, longest // 8)))
        slots.append([*part, *fresh(length)])
        before.append(len(slots[-1]) - 1 if decode else int(random.integers(0, len(slots[-1]))))
        if not decode and random.random() < 0.7:
            before[-1] = len(part)  # as SGLang has it: the shared part was cached
    if shuffled:
        order = random.permutation(number)
        slots, before = [slots[i] for i in order], [before[i] for i in order]
    batch = Batch(slots, before, Pool(kv_heads, numbers, dtype, seed))
    batch.forward_mode = ForwardMode.DECODE if decode else ForwardMode.EXTEND
    return batch, layer_of(kv_heads * each, kv_heads, numbers)


@given(batches())
def test_it_is_what_the_engines_own_gives(drawn: tuple[Batch, RadixAttention]) -> None:
    theirs, ours, backend = outputs(*drawn)
    assert pieces_of(backend) is not None
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) <= 5e-7


@given(batches(dtype=torch.bfloat16))
def test_in_bfloat16_it_is_as_near(drawn: tuple[Batch, RadixAttention]) -> None:
    theirs, ours, backend = outputs(*drawn, dtype=torch.bfloat16)
    assert pieces_of(backend) is not None
    assert ours.dtype == torch.bfloat16
    assert float((ours.float() - theirs.float()).abs().max()) <= 2**-7  # two steps of bfloat16 below 1


def test_slots_are_shared_where_their_numbers_are_equal() -> None:
    """Two groups behind one first slot: the groups' shared part is long, so that each is read by itself."""
    left, right = list(range(100, 400)), list(range(500, 800))
    slots = np.array([[7, *left, 1, 0], [7, *right, 2, 0], [7, *left, 3, 4], [7, *right, 5, 0]])
    ends = np.array([302, 302, 303, 302])
    found = plan(slots, ends - 1, ends, (2, 2, 512))
    assert found is not None
    by_first = {int(piece.queries[0, 0]): piece for piece in found}
    assert sorted(by_first) == [1, 2]
    one, two = by_first[2], by_first[1]
    assert one.queries.tolist() == [[2], [0]]
    assert one.shared.tolist() == [[2 * slot for slot in [7, *left]], [2 * slot + 1 for slot in [7, *left]]]
    assert one.own.tolist() == [[[6, 8], [2, 2]], [[7, 9], [3, 3]]]
    assert one.hidden is not None
    assert one.hidden.tolist() == [[[False, False]], [[False, True]]]
    assert sorted(two.queries.flatten().tolist()) == [1, 3]
    assert two.shared.shape == (2, 301)
    assert two.hidden is None
    # Where a piece costs more than it saves, all stay together.
    (whole,) = plan(slots, ends - 1, ends, (2, 2, 1)) or ()
    assert whole.shared.tolist() == [[14], [15]]


def test_equal_numbers_behind_another_slot_are_not_shared() -> None:
    slots = np.array([[1, 5, 6, 7, 8], [2, 5, 6, 7, 9]])
    ends = np.array([5, 5])
    found = plan(slots, ends - 1, ends, (1, 1, 8))
    assert found is not None
    assert all(piece.shared.shape[1] == 0 or len(piece.queries) == 1 for piece in found)


@given(
    st.lists(st.tuples(st.integers(0, 300) | st.just(3000), st.integers(1, 40) | st.just(900)), min_size=1, max_size=60)
)
def test_pieces_are_bounded_and_have_each_query_once(lengths: list[tuple[int, int]]) -> None:
    before, count = (np.array(column) for column in zip(*lengths, strict=True))
    ends = before + count
    slots = np.random.default_rng(0).integers(0, 9999, (len(ends), int(ends.max())))
    slots[:, :200] = slots[0, :200]
    heads = (4, 2, 16)
    found = plan(slots, before, ends, heads)
    if int((count * ends).max()) * heads[0] > attention._NUMBERS:
        assert found is None or count.max() == 1
        return
    assert found is not None
    queries = [sorted(set(row)) for piece in found for row in piece.queries.tolist()]
    assert sorted(query for row in queries for query in row) == list(range(count.sum()))
    by_first = {int(first): request for request, first in enumerate(np.cumsum(count) - count)}
    for piece in found:
        (k, e), shared, m = piece.queries.shape, piece.shared.shape[1], piece.own.shape[2]
        its = [by_first[int(row[0])] for row in piece.queries]
        assert k * e <= 2 * count[its].sum()
        assert k * m <= 2 * (ends[its] - shared).sum()
        assert k == 1 or k * e * (shared + m) * heads[0] <= attention._NUMBERS
        assert k == 1 or (shared + k * m) * heads[1] * heads[2] <= attention._NUMBERS


_OTHERS: dict[str, Callable[[RadixAttention, Batch], object]] = {
    "window": lambda layer, batch: setattr(layer, "sliding_window_size", 128),
    "cross": lambda layer, batch: setattr(layer, "is_cross_attention", True),
    "capped": lambda layer, batch: setattr(layer, "logit_cap", 30.0),
    "encoder": lambda layer, batch: setattr(layer, "attn_type", AttentionType.ENCODER_ONLY),
    "images": lambda layer, batch: setattr(layer, "attn_type", AttentionType.DECODER_BIDIRECTIONAL),
    "chunked": lambda layer, batch: setattr(layer, "use_irope", True),
    "temperature": lambda layer, batch: setattr(layer, "xai_temperature_len", 8),
    "speculative": lambda layer, batch: setattr(batch, "spec_info", object()),
    "quantised": lambda layer, batch: setattr(
        batch.token_to_kv_pool, "buffers", [each.to(torch.float8_e5m2) for each in batch.token_to_kv_pool.buffers]
    ),
    "strided": lambda layer, batch: setattr(
        batch.token_to_kv_pool,
        "buffers",
        [each.repeat(1, 1, 2)[..., : each.shape[2]] for each in batch.token_to_kv_pool.buffers],
    ),
    "long": lambda layer, batch: None,
}


@pytest.mark.parametrize("name", sorted(_OTHERS))
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_anything_else_goes_the_engines_own_way(name: str, mode: ForwardMode, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = [[1, 2, 3, 4, 5 + i] for i in range(3)]
    batch, layer = Batch(slots, [4, 4, 4], Pool(2, 8, torch.float32, 0)), layer_of(4, 2, 8)
    batch.forward_mode = mode
    batch.encoder_out_cache_loc = batch.out_cache_loc  # type: ignore[attr-defined]
    if name == "long":
        batch = Batch([[1, 2, 3, 4, 5, 6]] * 3, [4, 4, 4], batch.token_to_kv_pool)
        monkeypatch.setattr(attention, "_NUMBERS", 47)  # 2 queries, 6 slots and 4 heads
    _OTHERS[name](layer, batch)

    def attend(*args: object) -> None:
        raise AssertionError(f"{name} was not left to SGLang")

    monkeypatch.setattr(attention, "attend", attend)
    theirs, ours, _ = outputs(batch, layer)
    assert torch.equal(theirs, ours)


def test_requests_without_a_query_are_left_to_the_engine() -> None:
    """SGLang computes at least the last token of a request anew today; one with none must not move those of others."""
    pool, layer = Pool(2, 8, torch.float32, 0), layer_of(4, 2, 8)
    theirs, ours, backend = outputs(Batch([[1, 2, 3], [1, 2, 4], [1, 2, 5, 6]], [2, 3, 2], pool), layer)
    assert pieces_of(backend) is None
    assert torch.equal(theirs, ours)
    keys, values = pool.buffers
    assert not attention.handles(layer, Batch([[1]], [0], pool), torch.empty(0, 4, 8), keys, values)


def test_a_latent_cache_is_left_to_the_engine() -> None:
    """It has one head for all, whose values are a part of its keys."""
    pool = Pool(1, 8, torch.float32, 0)
    batch, query, (keys, values) = Batch([[1, 2, 3]], [2], pool), torch.rand(1, 4, 8), pool.buffers
    assert attention.handles(layer_of(4, 1, 8), batch, query, keys, values)
    assert not attention.handles(layer_of(4, 4, 8), batch, query, keys, values)
    assert not attention.handles(layer_of(4, 1, 8), batch, query, keys, values[..., :4].contiguous())


def test_a_new_batch_has_a_plan_of_its_own() -> None:
    runner: Any = type("Runner", (), {"device": "cpu"})
    backend, layer, pool = SharedPrefixAttention(runner), layer_of(2, 2, 8), Pool(2, 8, torch.float32, 0)
    q = torch.rand(1, 16)
    seen = []
    for slots in ([1, 2, 3], [4, 5, 6]):
        batch = Batch([slots], [2], pool)
        batch.forward_mode = ForwardMode.DECODE
        for _ in range(2):
            backend.forward_decode(q, q, q, layer, batch)
            seen.append(pieces_of(backend))
    assert seen[0] is seen[1]
    assert seen[2] is seen[3]
    assert seen[1] is not seen[2]


def sglang_of(**own: str) -> dict[str, Any]:
    config = composed(**{f"+{_SGLANG}.{name}": value for name, value in own.items()})
    fill_in(config, 64)
    return dict(config.actor_rollout_ref.rollout.engine_kwargs.sglang)


def test_a_run_has_it_unless_the_user_names_another(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    found = sglang_of()
    assert {name: found[name] for name in ATTENTION} == ATTENTION
    assert found["attention_backend"] == "torch_native"
    capfd.readouterr()
    for name in ("attention_backend", *ATTENTION):
        found = sglang_of(**{name: "torch_native"})
        assert found[name] == "torch_native"
        assert sum(each in found for each in ATTENTION) == (name in ATTENTION)
    assert "attention" not in capfd.readouterr().err
    # Nothing would register it in SGLang's processes.
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "models_of_mine")
    assert ATTENTION.keys().isdisjoint(sglang_of())
    assert "SGLANG_EXTERNAL_MODEL_PACKAGE='models_of_mine': attention is" in capfd.readouterr().err


def test_the_engine_knows_its_names() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.server_args import ServerArgs

    assert os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"].startswith("verl_multiturn.")
    runner: Any = type("Runner", (), {"device": "cpu"})
    for name in ATTENTION.values():
        assert type(ATTENTION_BACKENDS[name](runner)) is SharedPrefixAttention
    model = Path(__file__).parents[2] / "recipes" / "quickstart" / "model"
    found = ServerArgs(model_path=str(model), device="cpu", attention_backend="torch_native", **ATTENTION)
    assert found.attention_backend == "torch_native"  # by which SGLang chooses kernels beside attention
    assert {name: getattr(found, name) for name in ATTENTION} == ATTENTION
