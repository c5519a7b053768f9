"""Which weights sampled a record, and whether a model's tokenizer, template and tools are those of a recorded run.

An evaluation of a run's model, a replay, and a training on records call `refuse_other`, so that their errors are the
same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_multiturn.describe import show
from verl_multiturn.errors import CertificateError, ConfigError
from verl_multiturn.records.write.run_file import digest, digest_of_vocabulary


def refuse_other(
    run: Mapping[str, Any],
    remedies: Mapping[str, str],
    *,
    vocabulary: Mapping[str, int] | None = None,
    template: str | None = None,
    schemas: Sequence[Mapping[str, Any]] | None = None,
    model: str = "the model",
) -> None:
    """Refuse a tokenizer, a chat template or tools that are others than a run's; entries that its file lacks pass.

    Args:
        run: The run's file (`schema.RunFile`), or as much of it as is known.
        remedies: What to do, by `tokenizer`, `template` and `tools`.
        vocabulary: The tokenizer's vocabulary; None: it is not looked at. So with the next two.
        template: The chat template.
        schemas: The schemas of the tools, in their order.
        model: A name of the model, for the error.

    Raises:
        ConfigError: One is another, or the run's file has an entry that is not a tool's schema.
    """
    checks = {
        "tokenizer": ""
        if vocabulary is None
        else _of_model(run, "tokenizer", digest_of_vocabulary(vocabulary), f"tokenizer of {model}"),
        "template": ""
        if template is None
        else _of_model(run, "template", digest(template.encode()), f"chat template of {model}"),
        "tools": _of_tools(run, schemas),
    }
    for name, problem in checks.items():
        if problem:
            raise ConfigError(f"{problem}; {remedies[name]}")


def _of_model(run: Mapping[str, Any], entry: str, found: str, what: str) -> str:
    """Return that a part of a model is another than a run's; "": it is the same, or unknown for the run."""
    known = (run.get(entry) or {}).get("digest")
    return "" if known in (None, found) else f"the {what} is another than the run's"


def _of_tools(run: Mapping[str, Any], schemas: Sequence[Mapping[str, Any]] | None) -> str:
    """Return how tools differ from a run's; "": they do not."""
    known = run.get("schemas")
    if schemas is None or known is None or list(schemas) == list(known):
        return ""
    now, then = [schema["function"]["name"] for schema in schemas], names_of(known)
    if now != then:
        return f"the tools are {show(now, 200)}, the run's {show(then, 200)}"
    name = next(name for name, new, old in zip(now, schemas, known, strict=True) if new != old)
    return f"the schema of tool {name!r} is another than the run's"


def models_of(record: Mapping[str, Any]) -> list[str]:
    """Return the digests of the weights that sampled the trained tokens of a record, in the order of first use.

    Training on records, `lineage.jsonl`, `sessions forget` and the pages of a conversation call it. A record of one
    model has that one; one of a gateway has those of its deployments that a trained token's weight version names.

    Args:
        record: The record (`schema.Record`).

    Returns:
        The digests; [] where a trainer's changing weights sampled it, or no token is trained.

    Raises:
        CertificateError: A version names none of the record's models.
    """
    model = record["model"]
    if model is None or isinstance(model, str):
        return [] if model is None else [model]
    found: dict[str, None] = {}
    for row in record["rows"]:
        for _, mask, version, *_ in row["runs"]:
            if not mask:
                continue
            if not 0 <= version < len(model):
                raise CertificateError(
                    f"a trained token of record {record['request_id']!r} is of weight version {version}, and the "
                    f"record names {len(model)} models; take the file that the gateway wrote"
                )
            found[model[version]] = None
    return list(found)


def names_of(schemas: Sequence[Any]) -> list[str]:
    """Return the names of a run's tools.

    Args:
        schemas: The schemas in the run's file (`schema.RunFile`).

    Raises:
        ConfigError: One is not a schema of a tool.
    """
    names = []
    for index, schema in enumerate(schemas):
        function = schema.get("function") if isinstance(schema, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            raise ConfigError(
                f"the run's schemas[{index}] is {show(schema, 200)}, expected a tool's schema, with the name in its "
                "`function`; take the file that the run wrote"
            )
        names.append(name)
    return names
