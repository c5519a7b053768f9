"""Read a record of a training run, and verify it against the engine's tokens: `python verify_record.py [FILE]`.

A run writes records into its `record_dir`; `record.jsonl` beside this program is one conversation of such a run.
"""

import sys
from pathlib import Path

from verl_multiturn import Source
from verl_multiturn.records.read.records import read_records
from verl_multiturn.records.rows import columns
from verl_multiturn.records.verify.record import verify_record

path = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("record.jsonl"))
for record in read_records(path):
    (row,) = record["rows"]
    full = columns(row)
    print(f"step {record['step']}, {record['stop_reason']}, sampled by weight version {max(full['versions'])}")
    for message in record["messages"]:
        calls = [call["function"]["arguments"] for call in message.get("tool_calls", [])]
        print(f"  {message['role']:9} {calls or message['content']}")
    for source in Source:
        found = [m for s, m in zip(full["sources"], full["mask"], strict=True) if s == source]
        print(f"  {source.name:11} {len(found):3} tokens, {sum(found):2} trained")
    verified = verify_record(record)
    print(f"  {verified.sampled_tokens} sampled tokens, {len(verified.violations)} violations")

    runs = [list(run) for run in row["runs"]]
    observed = next(run for run in runs if run[4] == Source.OBSERVATION)
    observed[1] = 1  # as a faulty trainer would: a mask of 1
    for violation in verify_record({**record, "rows": [{**row, "runs": runs}]}).violations:
        print(f"  after tampering: {violation}")
