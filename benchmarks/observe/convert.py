"""Run `tests/long/observe/convert.py`, with environments for the packages of others; exit with 1 if it differs."""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from tests.long.observe import convert


def made(name: str, options: argparse.Namespace) -> str | None:
    """Return the Python that has some packages; None if there is none."""
    given: str | None = getattr(options, name)
    if given or not options.make:
        return given
    folder = Path(options.make) / name
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([options.python, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *convert.PACKAGES[name]], check=True)
    return str(python)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=convert.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", metavar="DIR", help="a real run; without it a synthetic one is made")
    for name, packages in convert.PACKAGES.items():
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"a Python with {', '.join(packages)}")
    parser.add_argument("--make", metavar="FOLDER", help="make these environments there, with pip")
    parser.add_argument("--python", default="python3.12", help="the Python of --make (Harbor needs 3.12)")
    options = parser.parse_args()
    began = time.monotonic()
    result = convert.run(options.run, {name: made(name, options) for name in convert.PACKAGES})
    print(json.dumps(result | {"seconds": round(time.monotonic() - began, 1)}))
    sys.exit(not result["ok"])
