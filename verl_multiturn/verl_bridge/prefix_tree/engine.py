"""`PrefixTreeEngine`: verl's FSDP engine, which computes each common prefix of a micro-batch's rows once.

verl chooses an engine by the vendor in `VERL_ENGINE_VENDOR`; `plugin.py` registers this one for two vendors of ours. A
batch takes this way:

    micro-batches     as many as their forests' tokens ask for       packing.py
      ↓
    forest            a micro-batch's rows, each prefix once         forest.py
      ↓
    model             its layers attend in the forest                attention.py
      ↓
    log-probs …       verl's own code, for each token of the forest; then for each token of the rows
      ↓
    loss              verl's, with the rows as they were

Invariants:
- Exact or not at all. A case that a forest cannot compute (`support.py`), or that differs in a probe before the
  first batch, is computed by verl's own code, and that is logged once; with `prefix_tree: on` it ends the run.
- The loss gets the columns that verl's engine gives it, in the same places. The last column of a row, which predicts
  nothing, is 0; verl has the beginning of its next row there.
- All ranks compute equally many micro-batches, and all of them a forest, or none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import postprocess_batch_func

from verl_multiturn.errors import ConfigError
from verl_multiturn.verl_bridge.names import ENGINE_VENDOR, STRICT_ENGINE_VENDOR
from verl_multiturn.verl_bridge.prefix_tree import packing
from verl_multiturn.verl_bridge.prefix_tree.attention import FOREST, NOT_HANDED_DOWN, ForestLayout, in_forest
from verl_multiturn.verl_bridge.prefix_tree.forest import Ints, grow, sort_rows
from verl_multiturn.verl_bridge.prefix_tree.support import unfit_batch, unfit_engine, unfit_loss, unfit_model

_FLAGS = ("distillation_use_topk", "distillation_only", "enable_routing_replay", "use_fused_kernels")
# Flags that verl's code of a micro-batch's outputs reads.
_OUTPUT_FLAGS = ("calculate_entropy", "calculate_sum_pi_squared")

_FURTHEST = {torch.float32: 1e-3}
"""How far a log-prob of the probe may lie from verl's; in half precision 0.2."""


class PrefixTreeEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine of a language model; see the module's docstring."""

    is_strict = False
    """Whether a batch that cannot be a forest ends the run."""
    _is_fit: bool | None = None
    """Whether the model's rows may be forests; None: not known yet."""
    _is_forest = False
    """Whether the micro-batches that are being computed are forests."""
    _told: set[str]

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        """Compute a batch as verl's engine does, in micro-batches that are forests.

        Args:
            data: verl's batch.
            loss_function: verl's loss.
            forward_only: Whether there is no backward pass.

        Raises:
            ConfigError: The batch cannot be computed in forests, and the run insists on them.
        """
        if self._is_fit is None:
            self._is_fit = self._find_fitness()
        flags = {name: tu.get_non_tensor_data(data=data, key=name, default=False) for name in _FLAGS}
        flags["rope_dimensions"] = data["position_ids"].dim() - 1
        actor = getattr(loss_function, "keywords", {}).get("config")  # of verl's partial `ppo_loss`
        if not self._is_fit or not self._allows(unfit_batch(flags) or unfit_loss(actor)):
            return super().forward_backward_batch(data, loss_function, forward_only)
        self._is_forest = True
        try:
            with in_forest(self._model_config()):
                return self._run(data, loss_function, forward_only)
        finally:
            self._is_forest = False

    def _run(self, data: Any, loss_function: Callable[..., Any], forward_only: bool) -> Any:
        """Run our micro-batches as verl's `forward_backward_batch` does."""
        group, device = self.get_data_parallel_group(), get_device_id()
        trained = data["loss_mask"].sum().to(device)
        torch.distributed.all_reduce(trained, op=torch.distributed.ReduceOp.SUM, group=group)
        totals = {"batch_num_tokens": trained.item(), "dp_size": self.get_data_parallel_size()}
        tu.assign_non_tensor(data, sp_size=self.ulysses_sequence_parallel_size, **totals)
        parts = self._parts(data)
        keeps = forward_only or tu.get_non_tensor_data(data=data, key="return_model_output", default=False)
        outputs = []
        for at, rows in enumerate(parts):
            is_last = at == len(parts) - 1
            sync = nullcontext() if forward_only else self._gradient_sync_context(is_last_micro_batch=is_last)
            with torch.set_grad_enabled(not forward_only), sync, torch.profiler.record_function(f"micro_batch{at}"):
                part = tu.index_select_tensor_dict(data, rows)
                loss, output = self.forward_step(part, loss_function=loss_function, forward_only=forward_only)
                if not forward_only:
                    (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            if not keeps:
                output.pop("model_output", None)
            outputs.append(output)
        # Our micro-batches are in another order than the rows, regardless of the batch's flag.
        order = tu.get_tensordict({}, {"use_dynamic_bsz": True})
        return postprocess_batch_func(output_lst=outputs, indices=parts, data=order)

    def _parts(self, data: Any) -> list[list[int]]:
        """Return the rows of each micro-batch; all ranks have equally many."""
        rows = sort_rows(*_rows_of(data))
        most = tu.get_non_tensor_data(data=data, key="max_token_len_per_gpu", default=None)
        if not tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
            lengths = data["input_ids"].offsets().diff().cpu().numpy()
            most = packing.largest(lengths, data["micro_batch_size_per_gpu"])
        number = torch.tensor([packing.count(rows, int(most))], device=get_device_id())
        group = self.get_data_parallel_group()
        torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX, group=group)
        return packing.divide(rows, int(number.item()))

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the inputs of the model, and the data for its outputs: a forest, or verl's own."""
        if not self._is_forest:
            inputs: tuple[dict[str, Any], dict[str, Any]] = super().prepare_model_inputs(micro_batch)
            return inputs
        forest, device = grow(*_rows_of(micro_batch)), micro_batch["input_ids"].device
        layout = ForestLayout(forest, device)

        def row(values: Ints) -> Tensor:
            return torch.from_numpy(values).to(device).unsqueeze(0)

        inputs_of_model = {"input_ids": row(forest.ids), "position_ids": row(forest.positions), "attention_mask": None}
        return {**inputs_of_model, FOREST: layout}, {"forest": forest, "layout": layout}

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Any]:
        """Return verl's columns of the rows, from the logits of the forest.

        Raises:
            ConfigError: A layer did not compute its attention in the forest.
        """
        if not self._is_forest:
            verls: dict[str, Any] = super().prepare_model_outputs(
                output, output_args, micro_batch, logits_processor_func
            )
            return verls
        forest, layout, logits = output_args["forest"], output_args["layout"], output.logits
        if reason := _left_out(layout, self._model_config()):
            raise ConfigError(f"prefix trees cannot be used with {reason}; set custom.multiturn.prefix_tree=off")
        ids, parents = (torch.from_numpy(each).to(logits.device) for each in (forest.ids, forest.parents))
        heats = _temperatures(micro_batch, logits.device)[torch.from_numpy(forest.rows).to(logits.device)]
        flags = {name: tu.get_non_tensor_data(data=micro_batch, key=name, default=False) for name in _OUTPUT_FLAGS}
        is_one = micro_batch["temperature"]
        is_one = not isinstance(is_one, Tensor) and float(is_one) == 1.0

        def verl(logits: Tensor, labels: Tensor, heats: Tensor, **flags: bool) -> dict[str, Tensor]:
            """Return the outputs of verl's own code for logits and labels, `(tokens,)` each."""
            begins = torch.tensor([0, len(labels)], device=labels.device)
            one = torch.nested.nested_tensor_from_jagged(labels, begins)
            args = {"input_ids_rmpad_rolled": labels, "temperature_rmpad": heats, "temperature_is_one": is_one}
            made = super(PrefixTreeEngine, self).prepare_model_outputs(
                SimpleNamespace(logits=logits.unsqueeze(0)),
                {**args, "pad_size": 0},
                tu.get_tensordict({"input_ids": one}, {**flags, "pad_mode": DatasetPadMode.NO_PADDING}),
                logits_processor_func,
            )
            return {name: each.values() for name, each in made.items()}

        branches = torch.from_numpy(forest.branches).to(logits.device)
        # First, since the pass over all tokens may write gradients into the logits.
        origins = parents[branches]
        further = [verl(logits[0, origins], ids[branches], heats[origins])["log_probs"]] if len(branches) else []
        columns = verl(logits[0], torch.roll(ids, -1), heats, **flags)
        log_probs = torch.cat([columns["log_probs"], *further, logits.new_zeros(1, dtype=columns["log_probs"].dtype)])
        places = dict.fromkeys(columns, forest.nodes) | {"log_probs": forest.edges % len(log_probs)}
        offsets = micro_batch["input_ids"].offsets()
        return {
            name: torch.nested.nested_tensor_from_jagged(
                each.index_select(0, torch.from_numpy(places[name]).to(logits.device)), offsets
            )
            for name, each in {**columns, "log_probs": log_probs}.items()
        }

    def _model_config(self) -> Any:
        module: Any = self.module
        return getattr(module, "module", module).config

    def _allows(self, reason: str | None) -> bool:
        """Return whether forests are computed; log once why not.

        Raises:
            ConfigError: They are not, and the run insists on them.
        """
        if reason is None:
            return True
        if self.is_strict:
            raise ConfigError(
                f"prefix_tree=on cannot be used with {reason}; set custom.multiturn.prefix_tree to auto or off"
            )
        told = self.__dict__.setdefault("_told", set())
        if reason not in told and self.rank == 0:
            print(f"verl-multiturn: no prefix trees in training, because of {reason}", file=sys.stderr)
        told.add(reason)
        return False

    def _find_fitness(self) -> bool:
        """Return whether the model's rows may be forests: nothing speaks against it, and the probe agrees."""
        config = self._model_config()
        reason = unfit_engine(self.engine_config, self.model_config, get_device_name())
        reason = reason or unfit_model(self.module, config)
        return self._allows(reason) and self._allows(self._probe())

    def _probe(self) -> str | None:
        """Compute a few made rows as verl does and as a forest; return the fault, if any."""
        draw, size = np.random.default_rng(0), int(self._model_config().get_text_config().vocab_size)
        base = draw.integers(0, size, 24)
        rows = [
            np.concatenate([base[:known], draw.integers(0, size, new)]) for known, new in ((24, 9), (24, 7), (11, 6))
        ]
        flags = {"temperature": 1.0, "calculate_entropy": True, "pad_mode": DatasetPadMode.NO_PADDING}
        flags["use_remove_padding"] = self.use_remove_padding
        columns = {"input_ids": rows, "position_ids": [np.arange(len(row)) for row in rows]}
        data = tu.get_tensordict({name: _jagged(each) for name, each in columns.items()}, flags)
        with torch.no_grad():
            _, verls = self.forward_step(data, None, True)
            self._is_forest = True
            try:
                with in_forest(self._model_config()):
                    _, ours = self.forward_step(data, None, True)
            except ConfigError as error:
                return str(error).partition("cannot be used with ")[2].partition(";")[0]
            except TypeError as error:
                if FOREST not in str(error):
                    raise
                return NOT_HANDED_DOWN
            finally:
                self._is_forest = False
        most = _FURTHEST.get(getattr(self, "_autocast_dtype", torch.bfloat16), 0.2)
        farthest: list[Tensor] = []
        for name in ("log_probs", "entropy"):
            pairs = zip(verls["model_output"][name].unbind(), ours["model_output"][name].unbind(), strict=True)
            farthest += [(one[:-1] - other[:-1]).abs().max().float() for one, other in pairs]
        # A NaN is beyond every bound; a maximum, and that over the ranks, may leave it out.
        differ = torch.stack(farthest).nan_to_num(nan=torch.inf).max().reshape(1).to(get_device_id())
        torch.distributed.all_reduce(differ, op=torch.distributed.ReduceOp.MAX, group=self.get_data_parallel_group())
        found = differ.item()
        return None if found <= most else f"a model whose probe differs by {found:.2g}, where {most:.2g} is the most"


class StrictPrefixTreeEngine(PrefixTreeEngine):
    """The engine of `prefix_tree: on`: a batch that cannot be a forest ends the run."""

    is_strict = True


def _rows_of(data: Any) -> tuple[Sequence[Ints], Sequence[Ints], list[float]]:
    """Return ids and positions of each row, and its temperature."""
    ids = data["input_ids"]
    begins = ids.offsets().cpu().numpy()[1:-1]
    heats = _temperatures(data, ids.device).tolist()
    ids, positions = (data[name].values().cpu().numpy() for name in ("input_ids", "position_ids"))
    return np.split(ids, begins), np.split(positions, begins), heats


def _temperatures(data: Any, device: torch.device) -> Tensor:
    """Return the temperature of each row, `(rows,)`."""
    given, rows = data["temperature"], data["input_ids"].shape[0]
    return given.to(device, torch.float32) if isinstance(given, Tensor) else torch.full((rows,), given, device=device)


def _jagged(rows: Sequence[Ints]) -> Tensor:
    return torch.nested.as_nested_tensor([torch.from_numpy(row) for row in rows], layout=torch.jagged)


def _left_out(layout: ForestLayout, config: Any) -> str | None:
    """Return the part of the attention that the forest did not compute; None: none."""
    layers = int(config.get_text_config().num_hidden_layers)
    if len(layout.layers) != layers:
        return f"a model of {layers} layers, {len(layout.layers)} of which took our attention"
    return layout.refusal


def register_engines() -> None:
    """Register both engines with verl, for the devices of its own FSDP engine.

    On the CPU platform, too, verl looks its FSDP engines up as those of CUDA.
    """
    for vendor, engine in ((ENGINE_VENDOR, PrefixTreeEngine), (STRICT_ENGINE_VENDOR, StrictPrefixTreeEngine)):
        register = EngineRegistry.register(
            model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda", "npu"], vendor=vendor
        )
        register(engine)
