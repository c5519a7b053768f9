"""verl's data set, adapted to a run of ours. The start-up check makes one of the two the `data.custom_cls`.

- `MeasuredRows` measures the length of prompts by the messages that the model is shown.
- `NumberedRows` knows the positions of its rows, so that the trainer can draw one again:
  `custom.multiturn.filter=difficulty`. The position is taken out of a prompt before it is submitted, so that no agent
  loop gets it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.utils.tensordict_utils import get_tensordict

from verl_multiturn.chat.codec import Message
from verl_multiturn.chat.messages import read_messages
from verl_multiturn.chat.template_form import TemplateForm
from verl_multiturn.errors import ConfigError
from verl_multiturn.rollout.groups.difficulty import Pools

POSITION = "__position__"
"""Column of a row's position in the data set."""


class ShownTemplate:
    """A tokenizer or processor whose chat template gets rows in the form in which a conversation gives them to it.

    A row that cannot be rendered is as short as can be: it stays in the data set, and the run refuses it by name. verl
    would leave it out.

    Args:
        template: The tokenizer or processor.
    """

    def __init__(self, template: Any) -> None:
        self._template = template
        self._form: TemplateForm | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_template":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._template, name)

    def __call__(self, *arguments: Any, **given: Any) -> Any:
        """Process texts and images as the processor does."""
        return self._template(*arguments, **given)

    def apply_chat_template(self, conversation: Any, **given: Any) -> Any:
        """Return the template's output for a row's messages."""
        if self._form is None:
            self._form = TemplateForm(self)
        try:
            messages = self._form.row(read_messages(conversation, "a row"))
            return self._template.apply_chat_template(messages, **given)
        except Exception:  # a template is other people's code and may raise anything
            return self._template.apply_chat_template([{"role": "user", "content": ""}], **given)

    def rendered(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]]) -> Any:
        """Return the template's text of a first prompt, by which `TemplateForm` detects the form of its input."""
        try:
            return self._template.apply_chat_template(
                list(messages), tools=list(schemas) or None, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # as above
            raise ConfigError(str(error)) from error

    def observation(self, *given: Any) -> Any:
        """Refuse to append messages; only first prompts are measured."""
        raise ConfigError("first prompts alone are measured")


class MeasuredRows(RLHFDataset):
    """verl's data set, whose filter of long prompts measures the model's prompts."""

    tokenizer: Any
    processor: Any

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """Return the rows whose prompts are not too long."""
        tokenizer, processor = self.tokenizer, self.processor
        self.tokenizer = ShownTemplate(tokenizer)
        self.processor = None if processor is None else ShownTemplate(processor)
        try:
            return super().maybe_filter_out_long_prompts(dataframe)
        finally:
            self.tokenizer, self.processor = tokenizer, processor


class NumberedRows(MeasuredRows):
    """verl's data set, whose rows have their position as a further column, where the trainer asks for it."""

    is_numbered = False
    """Whether the trainer asks. It does so for its training rows; those of validation may come from the same file."""

    def __getitem__(self, item: int) -> dict[str, Any]:
        """Return a row."""
        row: dict[str, Any] = super().__getitem__(item)
        return {**row, POSITION: int(item)} if self.is_numbered else row


def draw_prompt(pools: Pools, fetch: Callable[[], Any], rows: Any) -> Any:
    """Return a batch of one prompt: a row that is drawn again, or the data loader's next that is not passed over.

    Args:
        pools: The pools of the run, which note the draw.
        fetch: Returns the data loader's next prompt, as verl does.
        rows: The data set.
    """
    again = pools.again()
    if again is not None:
        columns = collate_fn([rows[again]])
        columns["uid"] = np.array([str(uuid.uuid4())], dtype=object)
        prompt, position = get_tensordict(columns), again
        del prompt[POSITION]
    else:
        for _ in range(max(1, len(rows))):
            prompt = fetch()
            position = int(only_value(prompt.pop(POSITION)))
            if not pools.passes_over(position):
                break
    pools.draw(str(only_value(prompt["uid"])), position)
    return prompt


def only_value(column: Any) -> Any:
    """Return the value of a column of a batch of one prompt."""
    (value,) = column.tolist() if hasattr(column, "tolist") else column
    return value
