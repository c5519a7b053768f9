"""Ray's start on the CPU platform, without parts that are not used there."""

from __future__ import annotations

import pytest

from tests.support.warm_python import run_warm

pytestmark = pytest.mark.stack

_PROGRAM = """
import ray
from verl_multiturn.cpu.ray_start import adapt_start
adapt_start()
adapt_start()
from ray._private.parameter import RayParams
from ray._private.node import Node
from verl_multiturn.cpu_processes.handle import SETUP_WORKER
params, own = RayParams(), RayParams(setup_worker_path="/own.py", num_cpus=3)
print(params.no_monitor, params.setup_worker_path == str(SETUP_WORKER), own.setup_worker_path, own.num_cpus)
node = Node.__new__(Node)
node.start_api_server(include_dashboard=False, raise_on_failure=False)
print(repr(node._webui_url))
try:
    node.start_api_server(include_dashboard=None, raise_on_failure=False)
except AttributeError:
    print("the default starts one")
"""


def test_ray_starts_less() -> None:
    ran = run_warm("-c", _PROGRAM)
    assert ran.stdout.splitlines()[-3:] == ["True True /own.py 3", "''", "the default starts one"], ran.stderr


_SLOW = """
import ray
from ray._private import node, services
from verl_multiturn.cpu import ray_start
ray_start.adapt_start()
asked = iter([RuntimeError, RuntimeError, None])
class Raylet:
    def poll(self):
        return CODE
class Started:
    all_processes = {"raylet": [type("Info", (), {"process": Raylet()})]}
    gcs_address = node_id = "here"
def get_node(address, node_id):
    if error := next(asked):
        raise error("not yet")
services.get_node = get_node
ray_start._until_ready(lambda: None, Started(), (), {})
print(len(list(asked)))
"""


@pytest.mark.parametrize(("code", "remaining"), [("None", "0"), ("1", "3")], ids=["slow", "dead"])
def test_a_raylet_may_take_long_while_it_lives(code: str, remaining: str) -> None:
    ran = run_warm("-c", _SLOW.replace("CODE", code))
    assert ran.stdout.splitlines()[-1:] == [remaining], ran.stderr
