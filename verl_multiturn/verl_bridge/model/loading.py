"""A model's tokenizer, template and processor, as verl's workers have them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer
from verl.utils import hf_tokenizer
from verl.utils.dataset.rl_dataset import get_dataset_class
from verl.utils.model import update_model_config
from verl.workers.rollout.utils import get_max_position_embeddings

from verl_multiturn.chat.images import ReadImages, as_they_are
from verl_multiturn.describe import describe
from verl_multiturn.errors import ConfigError
from verl_multiturn.rows.files import refuse_pointer
from verl_multiturn.verl_bridge.model.processors import image_reader, load_processor, plain_dict


@dataclass
class LoadedModel:
    """The parts of a model that a conversation needs beside an engine."""

    tokenizer: Any
    model_type: str | None
    """`model_type` in its config.json."""
    processor: Any = None
    read_images: ReadImages = as_they_are

    @property
    def template(self) -> str:
        """Return the chat template; of several the one by the name `default`."""
        shown = self.tokenizer.chat_template
        return str(shown.get("default") if isinstance(shown, dict) else shown)

    @property
    def fill_id(self) -> int:
        """Return the token id that fills empty positions: the padding token, or else the end token."""
        padding = self.tokenizer.pad_token_id
        fill: int = self.tokenizer.eos_token_id if padding is None else padding
        return fill


_RUN_ITS_CODE = (
    "if its author may run a program here, set actor_rollout_ref.model.trust_remote_code=true in a run "
    "(`verl-multiturn run NAME --check` makes the checks of its start), or "
    "give --trust-remote-code to eval, probe and export"
)


def load_model(section: Mapping[str, Any], remedy: str, data: Any = None) -> LoadedModel:
    """Load a model's tokenizer and processor from this machine, as verl's workers do; nothing is downloaded.

    The start-up check, an evaluation, a replay and the commands that examine a model call it.

    Args:
        section: `actor_rollout_ref.model`, or the part of it that is known: `path`, `tokenizer_path`,
            `trust_remote_code`, `custom_chat_template`.
        remedy: The remedy where it is not here, for the error.
        data: The section `data`, by which images of rows are read; None: those of verl's own data set.

    Raises:
        ConfigError: The tokenizer, config.json or processor is not here, or the model has code that may not run.
    """
    path, trust = str(section.get("tokenizer_path") or section["path"]), bool(section.get("trust_remote_code"))
    local, weights = str(Path(path).expanduser()), str(Path(str(section["path"])).expanduser())
    refuse_pointer(Path(local))
    refuse_pointer(Path(weights))
    try:
        tokenizer = hf_tokenizer(local, trust_remote_code=trust, local_files_only=True)
        # Weights that verl will fetch have no config.json here; the tokenizer's folder may have it.
        named = weights if (Path(weights) / "config.json").is_file() else local
        model_type = AutoConfig.from_pretrained(named, trust_remote_code=trust, local_files_only=True).model_type
    except Exception as error:  # the files of a model may be damaged in any way
        if not trust and "trust_remote_code" in str(error):  # transformers' sentence names its own argument
            raise ConfigError(
                f"the model {path!r} has Python files of its own, which were not run; {_RUN_ITS_CODE}"
            ) from None
        why = " ".join(describe(error).split())[:300]
        raise ConfigError(f"no tokenizer and config.json of {path!r} on this machine ({why}); {remedy}") from None
    processor = load_processor(local, model_type, trust)
    if template := section.get("custom_chat_template"):
        tokenizer.chat_template = template
        if processor is not None:
            processor.chat_template = template
    if processor is None:
        return LoadedModel(tokenizer, model_type)
    read = image_reader(processor, {}) if data is None else image_reader(processor, data, get_dataset_class(data))
    return LoadedModel(tokenizer, model_type, processor, read)


def differing_tokens(model: Any, teacher: str) -> tuple[list[str], list[str]]:
    """Compare a teacher's tokenizer with the policy's, since the teacher gets the policy's token ids.

    A special token has a place in conversations where the chat template names or renders it, or it is the tokenizer's
    own of a beginning, end, padding or unknown text. Other added tokens are words as all others.

    Args:
        model: The section `actor_rollout_ref.model`.
        teacher: Folder or name of the teacher.

    Returns:
        The policy's tokens that are others in the teacher's tokenizer, or have another id there; and those whose ids
        it does not have, with the differing ones that no conversation has, such as tokens that are reserved. Both are
        empty where a tokenizer is not on this machine.
    """
    path, trust = str(model.get("tokenizer_path") or model.path), bool(model.get("trust_remote_code"))
    try:
        policy, other = (
            AutoTokenizer.from_pretrained(
                str(Path(each).expanduser()), trust_remote_code=may_run, local_files_only=True
            )
            for each, may_run in ((path, trust), (teacher, False))  # verl runs no code of a teacher's, either
        )
        own, others = policy.get_vocab(), other.get_vocab()
        special = {str(token) for token in policy.added_tokens_decoder.values() if token.special}
        policy.chat_template = model.get("custom_chat_template") or policy.chat_template
        named = str(policy.chat_template) + _rendered(policy)
        ends = (policy.bos_token, policy.eos_token, policy.pad_token, policy.unk_token)
    except Exception:  # the files of a model may be damaged in any way; verl reports it when it loads the model
        return [], []
    names = {number: token for token, number in others.items()}
    found = {token: number for token, number in own.items() if others.get(token) != number}
    another = [
        token
        for token, number in found.items()
        if (token in others or number in names) and (token not in special or token in named or token in ends)
    ]
    return sorted(another), sorted(found.keys() - set(another))


def _rendered(tokenizer: Any) -> str:
    """Return short conversations as the template writes them: it may put a token together, `'<|' + role + '|>'`."""
    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
    said = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "t", "tool_call_id": "call00000", "name": "f"},
    ]
    texts = ""
    for messages in (said[:2], said[:4], said, said[1:4], said[1:]):
        with contextlib.suppress(Exception):  # a template may refuse a role
            texts += str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return texts


def vocabulary_size(path: str) -> int | None:
    """Return the number of ids that a teacher's model has embeddings of, as SGLang reads it.

    Args:
        path: Folder or name of the teacher.

    Returns:
        The number; None where its configuration is not on this machine, or needs code of its own.
    """
    try:
        config = AutoConfig.from_pretrained(str(Path(path).expanduser()), local_files_only=True)
        return int(config.get_text_config().vocab_size)
    except Exception:  # a configuration may be damaged in any way; the teacher's server reports it when it loads it
        return None


def most_tokens(model: Any) -> int | None:
    """Return the most tokens of a row that a model's configuration names, as verl's servers read it.

    Args:
        model: The section `actor_rollout_ref.model`.

    Returns:
        The number; None where the configuration is not on this machine, or verl cannot read the number in it.
    """
    path = str(Path(str(model.get("hf_config_path") or model.path)).expanduser())
    changes = plain_dict(model.get("override_config"))
    try:
        trust = bool(model.get("trust_remote_code"))
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust, local_files_only=True)
        update_model_config(config, changes.get("model_config", changes))
        return int(get_max_position_embeddings(config))
    except Exception:  # a configuration of the user's own may raise anything; verl reports it when it loads the model
        return None
