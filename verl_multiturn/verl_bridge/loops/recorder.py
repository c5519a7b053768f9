"""`recorder_of`: the recorder of a process of a run, by its settings."""

from __future__ import annotations

import functools
import logging

from verl_multiturn.config import MultiTurnSettings
from verl_multiturn.describe import describe
from verl_multiturn.records.write.recorder import Recorder
from verl_multiturn.records.write.records import RecordWriter
from verl_multiturn.records.write.run_file import new_start

logger = logging.getLogger(__name__)


def recorder_of(settings: MultiTurnSettings) -> Recorder | None:
    """Return the recorder of this process; None where a run keeps no records, or where its files cannot be created.

    The start-up check has looked at the folder; a worker that starts later may find the disk full.

    Raises:
        ConfigError: `record_redact` has an entry that is not a regular expression.
    """
    if settings.record_dir is None:
        return None
    return _recorder(
        settings.record_dir,
        settings.derived.record_start,
        settings.record_share,
        settings.record_max_gb,
        settings.record_redact,
    )


@functools.cache
def _recorder(
    folder: str, start: str | None, share: float, max_gb: float | None, redact: tuple[str, ...]
) -> Recorder | None:
    try:
        return Recorder(RecordWriter(folder, start or new_start(), share=share, max_gb=max_gb, redact=redact))
    except OSError as error:
        logger.error("this process keeps no records: %s; the run goes on", describe(error))
        return None
