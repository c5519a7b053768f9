"""Differences between the supported versions of SGLang, and the start of a run with other versions."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from verl_multiturn import ConfigError
from verl_multiturn.runs.version_sets import SETS, judge

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


@pytest.mark.parametrize("is_async", [False, True], ids=["until 0.5.12", "since 0.5.13"])
async def test_the_ids_of_a_prompt_are_kept_however_sglang_loads_images(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import verl  # noqa: F401  # the plugin makes SGLang importable on a CPU
    from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

    from verl_multiturn.verl_bridge.sglang.processors.qwen_vl import GivenIdsQwenVL

    prompts: list[Any] = []

    def load(self: Any, prompt: Any, multimodal_tokens: Any, image_data: Any = None, **others: Any) -> Any:
        prompts.append(prompt)
        return SimpleNamespace()

    async def load_later(*arguments: Any, **others: Any) -> Any:
        return load(*arguments, **others)

    monkeypatch.setattr(QwenVLImageProcessor, "load_mm_data", load_later if is_async else load)
    processor = object.__new__(GivenIdsQwenVL)
    tokens = SimpleNamespace(image_token="<image>")
    loaded = processor.load_mm_data([5, 6, 7], tokens, ["a picture", "another"])
    assert inspect.isawaitable(loaded) is is_async
    loaded = await loaded if is_async else loaded
    assert (loaded.given_ids, prompts) == ([5, 6, 7], ["<image><image>"])
    untouched = processor.load_mm_data("text", tokens, ["a picture"])
    untouched = await untouched if is_async else untouched
    assert not hasattr(untouched, "given_ids")
    assert prompts[1:] == ["text"]


def test_ids_do_not_take_the_quick_way_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    import verl  # noqa: F401
    from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

    from verl_multiturn.verl_bridge.sglang.processors.qwen_vl import GivenIdsQwenVL

    quick = "compose_image_artifacts"
    monkeypatch.setattr(QwenVLImageProcessor, quick, lambda self, text, artifacts: "composed", raising=False)
    processor = object.__new__(GivenIdsQwenVL)
    assert processor.compose_image_artifacts([5, 6], []) is None
    assert processor.compose_image_artifacts("text", []) == "composed"


def test_operators_that_sglang_looks_up_at_import_exist_by_name() -> None:
    import sgl_kernel  # noqa: F401
    import torch

    operators = torch.ops.sgl_kernel
    for name in ("fused_gdn_gating_cpu", "fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu"):
        with pytest.raises(RuntimeError, match=rf"sgl_kernel.ops.{name} is a CUDA kernel"):
            getattr(operators, name)(1)
    assert not hasattr(operators, "convert_weight_packed")  # by which SGLang asks for kernels of this CPU


@pytest.mark.parametrize(
    ("changes", "faults", "refused", "warned"),
    [
        ({}, ["never asked"], "", ""),
        ({"verl": "0.9.2"}, [], "", "verl 0.9.2 is untried, a patch release of 0.9.1; it takes some 30 s to"),
        ({"verl": "0.9.2"}, ["verl 0.9.2 has no x, which y needs"], "has no x, which y needs; run `verl-mu", ""),
        ({"verl": "0.10.0"}, [], "verl 0.10.0 is in no set, .*; a minor release .*; run `verl-multiturn doctor`", ""),
        ({"sglang": "0.5.20"}, [], "verl 0.9.1 cannot start sglang 0.5.20: ", ""),
        ({"tensordict": "0.9.1"}, [], "", "tensordict 0.9.1 is in no set, the nearest has 0.10.0"),
    ],
)  # fmt: skip
def test_the_start_of_a_run_looks_at_the_versions(
    changes: dict[str, str],
    faults: list[str],
    refused: str,
    warned: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from verl_multiturn.verl_bridge.compat import contract
    from verl_multiturn.verl_bridge.startup import versions

    monkeypatch.setattr(versions, "judge", lambda: judge({**SETS[0].versions, **changes}))
    monkeypatch.setattr(contract, "check", lambda: faults)
    if refused:
        with pytest.raises(ConfigError, match=refused):
            versions.check_versions()
    else:
        versions.check_versions()
    assert warned in caplog.text
    assert ("all names that we use are there" in caplog.messages) is bool(warned)
