"""verl's computations that the CPU platform does at once: the same numbers, gradients and parts as verl's own."""

from __future__ import annotations

import pytest
import torch

from verl_multiturn.cpu import tensors

pytestmark = pytest.mark.stack


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 11), (2, 3, 11), (0, 11)])
@pytest.mark.parametrize("at_once", [1, 30, 1 << 22])
def test_log_probabilities_and_their_gradients(
    shape: tuple[int, ...], dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "_LOGITS", at_once)
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(shape, generator=generator) * 9).to(dtype)
    labels = torch.randint(0, shape[-1], shape[:-1], generator=generator)
    weights = torch.randn(shape[:-1], generator=generator).to(dtype)
    if not logits.numel():
        with pytest.raises(RuntimeError):  # as verl's
            tensors.log_probs(logits, labels)
        return
    seen = []
    for function in (tensors.log_probs, tensors._verls_log_probs):
        given = logits.clone().requires_grad_()
        values = function(given, labels)
        (values * weights).sum().backward()
        seen.append((values.detach(), given.grad))
    for ours, verls in zip(*seen, strict=True):
        assert ours.shape == verls.shape
        assert ours.dtype == verls.dtype
        torch.testing.assert_close(ours, verls)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("is_equal", [True, False])
def test_the_parts_of_a_batch(parts: int, is_equal: bool) -> None:
    for seed in range(20):
        work = torch.randint(1, 5 if seed % 2 else 10**9, (16,), generator=torch.Generator().manual_seed(seed))
        verls = tensors._verls_partitions(seqlen_list=work, k_partitions=parts, equal_size=is_equal)
        assert tensors.partitions(seqlen_list=work, k_partitions=parts, equal_size=is_equal) == verls
        assert tensors.partitions(seqlen_list=work.tolist(), k_partitions=parts, equal_size=is_equal) == verls


def test_verl_uses_them_on_the_cpu_platform() -> None:
    import verl.utils.seqlen_balancing
    import verl.utils.torch_functional

    assert verl.utils.torch_functional.logprobs_from_logits_v2 is tensors.log_probs
    assert verl.utils.seqlen_balancing.karmarkar_karp is tensors.partitions
