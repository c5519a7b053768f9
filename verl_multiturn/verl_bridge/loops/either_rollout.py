"""`EitherRollout`: the class that a training worker of verl finds under the name `sglang`; it imports this module."""

from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

from verl_multiturn.verl_bridge.servers.registrations import OUR_ROLLOUT, either
from verl_multiturn.verl_bridge.settings import runs_our_server

EitherRollout = either(ServerAdapter, OUR_ROLLOUT, lambda given: runs_our_server(given["config"]))
