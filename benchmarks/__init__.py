"""Measurements and attacks that are run by hand: `python -m benchmarks.NAME`, in whichever folder NAME lies."""

from pathlib import Path

# A folder shows a subject. The folders are not packages: a benchmark has one name, wherever it lies.
__path__[:0] = sorted(str(path) for path in Path(__file__).parent.iterdir() if path.is_dir() and path.name != "results")
