"""Everything we use of Flower that is not its public API, with the reason for each use.

Public are `flwr.app`, `flwr.clientapp`, `flwr.serverapp` and `flwr.serverapp.strategy`; any release may
change the rest. Our other modules import internal names from here. A name is imported from Flower on first
use, because some take seconds: the SuperLink imports a database and a web server.

After an upgrade of Flower, `pytest -m slow tests/core/test_flower_internals.py` lists each name that has gone
or changed, with the reason from the table below. pyproject.toml allows only versions of Flower that CI tests.
"""
# ruff: noqa: F401  (imported for type checkers: at run time `__getattr__` finds them)

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from flwr.app import Message, Metadata

if TYPE_CHECKING:
    import httpx
    from flwr.cli.build import build_fab_from_disk
    from flwr.common.config import parse_config_args
    from flwr.common.constant import (
        FLWR_INTERNAL_GRPC_CONTROL_API,
        FLWR_INTERNAL_GRPC_FLEET_API,
        HEARTBEAT_DEFAULT_INTERVAL,
        ISOLATION_MODE_PROCESS,
        ISOLATION_MODE_SUBPROCESS,
        ErrorCode,
        SubStatus,
    )
    from flwr.common.serde import fab_to_proto, user_config_to_proto
    from flwr.proto.control_pb2 import (
        ListNodesRequest,
        ListNodesResponse,
        ListRunsRequest,
        RegisterNodeRequest,
        StartRunRequest,
        StopRunRequest,
        StreamLogsRequest,
        UnregisterNodeRequest,
    )
    from flwr.proto.fleet_pb2 import (
        ActivateNodeRequest,
        DeactivateNodeRequest,
        PullMessagesRequest,
        PullMessagesResponse,
        PushMessagesRequest,
        PushMessagesResponse,
    )
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
    from flwr.proto.message_pb2 import (
        PullObjectRequest,
        PullObjectResponse,
        PushObjectRequest,
        PushObjectResponse,
    )
    from flwr.proto.node_pb2 import Node
    from flwr.proto.run_pb2 import GetRunRequest
    from flwr.proto.runtime_pb2 import AcquireTaskRequest, AcquireTaskResponse, SendTaskHeartbeatRequest
    from flwr.proto.task_pb2 import Task
    from flwr.serverapp.strategy.fedtrimmedavg import trim_mean
    from flwr.supercore.constant import TaskType
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.corestate import in_memory_corestate, sql_corestate
    from flwr.supercore.exit import add_exit_handler
    from flwr.supercore.fab import Fab
    from flwr.supercore.heartbeat import HeartbeatSender
    from flwr.supercore.http_logging import get_uvicorn_log_config
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
    from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
    from flwr.supercore.object_store import NoObjectInStoreError, ObjectStore, ObjectStoreFactory
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supercore.protobuf.client import ProtobufClient, ProtobufClientInterceptor
    from flwr.supercore.retry import RetryInvoker
    from flwr.supercore.run import Run, RunNotRunningException
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.supercore.utils import get_flwr_home
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
    from flwr.superlink.cli.flower_superlink import (
        _parse_superlink_lifespan_config as parse_superlink_arguments,
    )
    from flwr.superlink.main import create_app as create_superlink_app
    from flwr.supernode import fleet_http_connection
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.main import create_app as create_supernode_app
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
    from flwr.supernode.nodestate import NodeState, NodeStateFactory
    from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState
    from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output
    from flwr.supernode.start_client_internal import start_client_internal


@dataclass(frozen=True)
class Internal:
    """The module and name of an internal in Flower, and why we use it."""

    module: str
    name: str
    why: str


def _table(*rows: tuple[str, str, str]) -> dict[str, Internal]:
    """Rows of (module, names, why); `ours=theirs` if our name differs from Flower's."""
    found = {}
    for module, names, why in rows:
        for word in names.split():
            ours, _, theirs = word.partition("=")
            found[ours] = Internal(f"flwr.{module}", theirs or ours, why)
    return found


_CONTROL = "Requests of the Control API, whose client is ControlHttpClient."
_FLEET = "Types of the Fleet API: our SuperNode overrides these calls to notice when nothing moves any more."
_OWN_SUBMIT = "`flwr run` cannot show a client certificate: with an operator's kit we do what it does."
_TASKS = "The executor takes its tasks from the SuperNode as flower-superexec does, in one lasting process."

INTERNALS = _table(
    # Everywhere
    ("supercore.utils", "get_flwr_home", "Our caches and run folders lie in Flower's home folder."),
    (
        "common.constant",
        "ErrorCode",
        "The server retries or drops a client by the error's code, which only these constants explain.",
    ),
    (
        "supercore.task_identity",
        "TaskIdentity",
        "A message reads its sender from here, and without a SuperLink nothing else sets it.",
    ),
    ("supercore.run", "Run", "The type of a property of Grid that the in-process grid must define."),
    (
        "serverapp.strategy.fedtrimmedavg",
        "trim_mean",
        "The trimmed mean of FedTrimmedAvg; the class itself has no way to aggregate arrays alone.",
    ),
    # Submitting runs and following them
    (
        "supercore.control",
        "ControlHttpClient",
        "The client of `flwr list` and `flwr log`: a call takes milliseconds, the command a second of CPU.",
    ),
    (
        "proto.control_pb2",
        "ListNodesRequest ListNodesResponse ListRunsRequest RegisterNodeRequest StartRunRequest "
        "StopRunRequest StreamLogsRequest UnregisterNodeRequest",
        _CONTROL,
    ),
    ("cli.build", "build_fab_from_disk", _OWN_SUBMIT),
    ("supercore.fab", "Fab", _OWN_SUBMIT),
    ("common.config", "parse_config_args", _OWN_SUBMIT),
    ("common.serde", "fab_to_proto user_config_to_proto", _OWN_SUBMIT),
    # The server's SuperLink, on a socket instead of a port
    ("superlink.main", "create_superlink_app=create_app", "flower-superlink listens on a TCP port only."),
    (
        "superlink.cli.flower_superlink",
        "SuperLinkLifespan parse_superlink_arguments=_parse_superlink_lifespan_config",
        "Our SuperLink takes the settings of flower-superlink and starts what that starts.",
    ),
    ("supercore.http_logging", "get_uvicorn_log_config", "Our SuperLink logs in Flower's format."),
    (
        "common.constant",
        "FLWR_INTERNAL_GRPC_CONTROL_API FLWR_INTERNAL_GRPC_FLEET_API",
        "These variables open further ports without access control: our SuperLink unsets them.",
    ),
    (
        "supercore.primitives.asymmetric",
        "public_key_to_bytes",
        "A node is registered by its public key, in Flower's encoding.",
    ),
    (
        "supercore.corestate",
        "in_memory_corestate sql_corestate",
        "The SuperLink starts another process for a run without a heartbeat in 30 s: ours waits longer.",
    ),
    # A site's SuperNode, on a socket instead of a port
    ("supernode.main", "create_supernode_app=create_app", "flower-supernode knows TCP ports only."),
    (
        "supernode.start_client_internal",
        "start_client_internal",
        "The loop of flower-supernode, without its command line and its port.",
    ),
    (
        "common.constant",
        "ISOLATION_MODE_PROCESS ISOLATION_MODE_SUBPROCESS",
        "start_client_internal takes the isolation mode as one of these.",
    ),
    ("supercore.exit", "add_exit_handler", "Flower ends the process by itself: our web server ends first."),
    (
        "supernode",
        "fleet_http_connection",
        "Flower's SuperNode makes its HTTP client here, without a client certificate: ours replaces it here.",
    ),
    (
        "supernode.fleet_http_client",
        "FleetHttpClient",
        "The SuperNode's client: ours shows the site's certificate and notices when nothing moves any more.",
    ),
    ("supercore.protobuf.client", "ProtobufClient ProtobufClientInterceptor", "Types of Flower's clients."),
    ("supercore.retry", "RetryInvoker", "A type in the constructor of FleetHttpClient, which we override."),
    (
        "proto.fleet_pb2",
        "PullMessagesRequest PullMessagesResponse PushMessagesRequest PushMessagesResponse",
        _FLEET,
    ),
    ("proto.heartbeat_pb2", "SendNodeHeartbeatRequest SendNodeHeartbeatResponse", _FLEET),
    (
        "proto.message_pb2",
        "PullObjectRequest PullObjectResponse PushObjectRequest PushObjectResponse",
        _FLEET,
    ),
    ("proto.node_pb2", "Node", _FLEET),
    (
        "proto.run_pb2",
        "GetRunRequest",
        "The SuperNode asks whether a run has ended, and drops its work then.",
    ),
    # What a SuperNode holds of messages
    (
        "supernode.nodestate.in_memory_nodestate",
        "InMemoryNodeState",
        "Flower's store keeps messages of runs that ended during a transfer, and waits for executors that "
        "have gone: our subclass drops or answers them.",
    ),
    ("supernode.nodestate", "NodeState NodeStateFactory", "The factory gives Flower's parts our store."),
    (
        "supercore.object_store",
        "NoObjectInStoreError ObjectStore ObjectStoreFactory",
        "Our store looks here whether all arrays of a reply have arrived.",
    ),
    (
        "supercore.inflatable.inflatable_object",
        "iterate_object_tree",
        "Our store looks here whether all arrays of a reply have arrived.",
    ),
    ("proto.task_pb2", "Task", "A type in a method of InMemoryNodeState that we override."),
    # A site's executor
    ("supercore.runtime", "RuntimeHttpClient", "The executor's client: ours uses the kit's socket."),
    ("proto.runtime_pb2", "AcquireTaskRequest AcquireTaskResponse SendTaskHeartbeatRequest", _TASKS),
    ("supercore.constant", "TaskType", _TASKS),
    ("common.constant", "SubStatus", _TASKS),
    ("supernode.runtime.run_clientapp", "pull_task_input push_message push_task_output", _TASKS),
    ("supercore.heartbeat", "HeartbeatSender", "The SuperNode gives a task up without its heartbeat."),
    (
        "supercore.interceptors",
        "RuntimeTokenHttpInterceptor RuntimeVersionHttpInterceptor",
        "The SuperNode expects a task's token and our version in the headers of each request.",
    ),
    (
        "supercore.inflatable.inflatable_utils",
        "ObjectPullError ObjectPushError",
        "What the transfer of a message raises: the executor continues with the next message.",
    ),
    ("supercore.run", "RunNotRunningException", "What sending a reply raises once its run has ended."),
    # `fedfrozen site check`
    (
        "proto.fleet_pb2",
        "ActivateNodeRequest DeactivateNodeRequest",
        "The check registers with the server for a moment, to see whether it accepts the site's key.",
    ),
    (
        "common.constant",
        "HEARTBEAT_DEFAULT_INTERVAL",
        "The check registers with the server for a moment, with Flower's heartbeat interval.",
    ),
    (
        "supernode.node_auth_http_interceptor",
        "NodeAuthHttpInterceptor",
        "The check signs its requests as a SuperNode does.",
    ),
)

# The SuperExec looks for tasks every second unless this environment variable has fewer seconds.
TASK_POLL_INTERVAL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"


def __getattr__(name: str) -> Any:
    """Import an internal of Flower on first use."""
    if name not in INTERNALS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    internal = INTERNALS[name]
    try:
        found = getattr(import_module(internal.module), internal.name)
    except AttributeError:  # a submodule that nothing has imported yet
        found = import_module(f"{internal.module}.{internal.name}")
    globals()[name] = found
    return found


def set_sender(node_id: int) -> None:
    """Set the sender of this process's messages, which a SuperLink would set."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 0, node_id, 0


def set_message_id(message: Message, message_id: str) -> None:
    """Flower's own grid sets the id in the same way; `Metadata` has no setter for it."""
    message.metadata.__dict__["_message_id"] = message_id


def copy_message(message: Message, metadata: Mapping[str, Any]) -> Message:
    """The same content with other metadata, by the private names of their fields (`_dst_node_id`).

    The constructor of `Message` checks each argument. For the clients of a round that takes longer than all
    else in sending them their requests.
    """
    copied, other = object.__new__(Metadata), object.__new__(Message)
    copied.__dict__.update(message.metadata.__dict__)
    copied.__dict__.update(metadata)
    other.__dict__.update(message.__dict__)
    other.__dict__["_metadata"] = copied
    return other


def replace_http_client(client: "ProtobufClient", http: "httpx.Client") -> None:
    """Let a client of Flower's use this connection: its constructor knows TCP ports only."""
    client._client.close()
    client._client = http


def use_fleet_client(client: "type[FleetHttpClient]") -> None:
    """Let Flower's SuperNode make clients of this class: it has no option for it."""
    from flwr.supernode import fleet_http_connection

    fleet_http_connection.FleetHttpClient = client  # type: ignore[misc]
