"""Flower's internals: only the adapter names them, and each is what we expect of it.

The slow tests are for an upgrade of Flower: every name that has gone or changed fails on its own, with the
reason for which we use it.
"""

import ast
import inspect
from pathlib import Path

import pytest
from flwr.app import Array, Error, Message, RecordDict

from fedfrozen_app.core import flower_internals
from fedfrozen_app.core.flower_internals import INTERNALS, copy_message, set_message_id, set_sender
from fedfrozen_app.core.slow_starts import allow_slow_starts

PACKAGE = Path(flower_internals.__file__).parents[1]
PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy")

# How we call them: (number of positional arguments, with `self`; keywords).
CALLS = {
    "ControlHttpClient": (1, "verify"),
    "ControlHttpClient.ListNodes": (2, ""),
    "ControlHttpClient.ListRuns": (2, ""),
    "ControlHttpClient.RegisterNode": (2, ""),
    "ControlHttpClient.StartRun": (2, ""),
    "ControlHttpClient.StopRun": (2, ""),
    "ControlHttpClient.StreamLogs": (2, ""),
    "ControlHttpClient.UnregisterNode": (2, ""),
    "ControlHttpClient.close": (1, ""),
    "Fab": (3, ""),
    "FleetHttpClient": (1, "interceptors verify retry_invoker"),
    "FleetHttpClient.ActivateNode": (2, ""),
    "FleetHttpClient.DeactivateNode": (2, ""),
    "FleetHttpClient.GetRun": (2, ""),
    "HeartbeatSender": (1, ""),
    "HeartbeatSender.start": (1, ""),
    "HeartbeatSender.stop": (1, ""),
    "InMemoryNodeState": (1, ""),
    "InMemoryNodeState._cleanup_expired_task_tokens_locked": (1, ""),
    "InMemoryNodeState._store_generated_message": (2, ""),
    "InMemoryNodeState.record_message_processing_end": (2, ""),
    "InMemoryNodeState.record_message_processing_start": (2, ""),
    "NodeStateFactory": (0, "objectstore_factory"),
    "ObjectPullError": (2, ""),
    "ObjectStore.delete": (2, ""),
    "ObjectStore.get": (2, ""),
    "ObjectStore.get_object_tree": (2, ""),
    "ObjectStoreFactory.store": (1, ""),
    "ObjectStoreFactory": (0, ""),
    "RuntimeHttpClient": (1, "interceptors verify"),
    "RuntimeHttpClient.AcquireTask": (2, ""),
    "RuntimeHttpClient.SendTaskHeartbeat": (2, ""),
    "RuntimeHttpClient.close": (1, ""),
    "RuntimeTokenHttpInterceptor": (1, ""),
    "RuntimeVersionHttpInterceptor": (0, "component_name"),
    "NodeAuthHttpInterceptor": (2, ""),
    "add_exit_handler": (1, ""),
    "build_fab_from_disk": (1, ""),
    "create_superlink_app": (2, ""),
    "create_supernode_app": (1, ""),
    "fab_to_proto": (1, ""),
    "get_flwr_home": (0, ""),
    "get_uvicorn_log_config": (1, ""),
    "iterate_object_tree": (1, ""),
    "parse_config_args": (1, ""),
    "parse_superlink_arguments": (0, ""),
    "public_key_to_bytes": (1, ""),
    "pull_task_input": (1, ""),
    "push_message": (3, ""),
    "push_task_output": (4, ""),
    "start_client_internal": (
        0,
        "state_factory server_address root_certificates insecure authentication_keys max_retries isolation "
        "runtime_api_address node_config",
    ),
    "trim_mean": (2, ""),
    "user_config_to_proto": (1, ""),
}

# Methods that a class of ours overrides: their parameters, exactly.
OVERRIDDEN = {
    "FleetHttpClient.PullMessages": "self request",
    "FleetHttpClient.PullObject": "self request",
    "FleetHttpClient.PushMessages": "self request",
    "FleetHttpClient.PushObject": "self request",
    "FleetHttpClient.SendNodeHeartbeat": "self request",
    "FleetHttpClient._unary_unary": "self path rpc_method request response_type timeout",
    "FleetHttpClient.from_server_address": "server_address insecure root_certificates interceptors "
    "retry_invoker",
    "InMemoryNodeState._on_task_tokens_expired": "self tasks",
    "InMemoryNodeState.delete_messages": "self message_ids",
    "InMemoryNodeState.finish_task": "self task_id sub_status details",
    "InMemoryNodeState.get_messages_legacy": "self run_ids is_reply limit",
    "InMemoryNodeState.store_message": "self message",
    "NodeStateFactory.state": "self",
    "RuntimeHttpClient.PullObject": "self request",
    "RuntimeHttpClient.PushObject": "self request",
}

# Fields of messages in Flower's protocol that we write or read.
FIELDS = {
    "AcquireTaskRequest": "supported_task_types",
    "AcquireTaskResponse": "task token",
    "ActivateNodeRequest": "public_key heartbeat_interval",
    "DeactivateNodeRequest": "node_id",
    "GetRunRequest": "node run_id",
    "ListNodesRequest": "",
    "ListNodesResponse": "nodes_info",
    "ListRunsRequest": "run_id",
    "Node": "node_id",
    "PullMessagesRequest": "node",
    "PullMessagesResponse": "",
    "PullObjectRequest": "object_id",
    "PullObjectResponse": "object_available",
    "PushMessagesRequest": "",
    "PushMessagesResponse": "",
    "PushObjectRequest": "",
    "PushObjectResponse": "",
    "RegisterNodeRequest": "public_key name",
    "SendNodeHeartbeatRequest": "",
    "SendNodeHeartbeatResponse": "success",
    "SendTaskHeartbeatRequest": "",
    "StartRunRequest": "fab override_config",
    "StopRunRequest": "run_id",
    "StreamLogsRequest": "run_id after_timestamp",
    "Task": "task_id status",
    "UnregisterNodeRequest": "node_id",
}

# Constants and other attributes.
ATTRIBUTES = {
    "ErrorCode": "CLIENT_APP_CRASHED CLIENT_APP_RAISED_EXCEPTION MESSAGE_UNAVAILABLE NODE_UNAVAILABLE "
    "REPLY_MESSAGE_UNAVAILABLE",
    "SubStatus": "COMPLETED FAILED",
    "TaskIdentity": "_node_id _run_id _task_id",
    "TaskType": "CLIENT_APP",
    "fleet_http_connection": "FleetHttpClient",
    "in_memory_corestate": "InMemoryCoreState now timedelta",
    "sql_corestate": "SqlCoreState TaskModel now timedelta update",
}

# Only imported as a type, a constant or an exception: it is enough that they exist.
BARE = {
    "FLWR_INTERNAL_GRPC_CONTROL_API",
    "FLWR_INTERNAL_GRPC_FLEET_API",
    "HEARTBEAT_DEFAULT_INTERVAL",
    "ISOLATION_MODE_PROCESS",
    "ISOLATION_MODE_SUBPROCESS",
    "NoObjectInStoreError",
    "NodeState",
    "ObjectPushError",
    "ProtobufClient",
    "ProtobufClientInterceptor",
    "RetryInvoker",
    "Run",
    "RunNotRunningException",
    "SuperLinkLifespan",
}


def imported_from_flower(path: Path) -> dict[str, str]:
    """Our name of each import from flwr -> where it is from."""
    found: dict[str, str] = {}
    text = path.read_text("utf-8")
    if "flwr" not in text:  # most files; parsing them all takes seconds
        return found
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr":
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name: alias.name for alias in node.names if alias.name.split(".")[0] == "flwr"}
    return found


def test_only_the_adapter_imports_internals_of_flower():
    found = [
        f"{path.relative_to(PACKAGE)} imports {source}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != Path(flower_internals.__file__)
        for source in imported_from_flower(path).values()
        if source.rpartition(".")[0] not in PUBLIC
    ]
    assert not found, "import them through fedfrozen_app/core/flower_internals.py, with a reason"


def test_type_checkers_and_python_find_the_same_names():
    imported = imported_from_flower(Path(flower_internals.__file__))
    declared = {name: f"{internal.module}.{internal.name}" for name, internal in INTERNALS.items()}
    public = {"Message": "flwr.app.Message", "Metadata": "flwr.app.Metadata"}
    assert imported == declared | public


def test_every_internal_has_an_expectation():
    named = {path.partition(".")[0] for path in (*CALLS, *OVERRIDDEN, *FIELDS, *ATTRIBUTES)} | BARE
    assert named == INTERNALS.keys()


def test_a_name_that_is_not_in_the_table_is_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = flower_internals.Nothing


def find(path: str):
    """An internal, or a member of one; where it is not there the test fails with our reason for using it."""
    name, *members = path.split(".")
    internal = INTERNALS[name]
    try:
        found = getattr(flower_internals, name)
        for member in members:
            found = getattr(found, member)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{internal.module} has no {path} any more ({error}). We use it because: {internal.why}")
    return found


def changed(path: str, how: str) -> str:
    internal = INTERNALS[path.partition(".")[0]]
    return f"{path} of {internal.module} has changed: {how}. We use it because: {internal.why}"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(INTERNALS))
def test_it_exists(name):
    assert find(name) is not None


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(CALLS))
def test_it_can_be_called_as_we_call_it(path):
    count, words = CALLS[path]
    signature = inspect.signature(find(path))
    try:
        signature.bind(*range(count), **dict.fromkeys(words.split()))
    except TypeError as error:
        pytest.fail(changed(path, f"{error}; its parameters are {signature}"))


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(OVERRIDDEN))
def test_it_has_the_parameters_of_our_override(path):
    parameters = list(inspect.signature(find(path)).parameters)
    assert parameters == OVERRIDDEN[path].split(), changed(path, f"its parameters are {parameters}")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FIELDS))
def test_it_has_the_fields_that_we_use(name):
    fields = find(name).DESCRIPTOR.fields_by_name
    lost = [field for field in FIELDS[name].split() if field not in fields]
    assert not lost, changed(name, f"it has no {', '.join(lost)}")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ATTRIBUTES))
def test_it_has_the_attributes_that_we_use(name):
    lost = [attribute for attribute in ATTRIBUTES[name].split() if not hasattr(find(name), attribute)]
    assert not lost, changed(name, f"it has no {', '.join(lost)}")


@pytest.mark.slow
def test_the_store_of_messages_has_the_attributes_that_we_use():
    factory = find("NodeStateFactory")(objectstore_factory=find("ObjectStoreFactory")())
    for attribute in ("lock", "state_instance", "objectstore_factory"):
        assert hasattr(factory, attribute), changed("NodeStateFactory", f"it has no {attribute}")
    state = factory.state()
    used = "lock_msg_store lock_task_store msg_store object_store task_store task_token_store time_store"
    for attribute in used.split():
        assert hasattr(state, attribute), changed("InMemoryNodeState", f"it has no {attribute}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ControlHttpClient", "FleetHttpClient", "RuntimeHttpClient"])
def test_a_client_keeps_its_connection_where_we_replace_it(name):
    with find(name)("http://127.0.0.1:1") as client:
        assert hasattr(client, "_client"), changed(name, "replace_http_client finds no _client")


@pytest.mark.slow
def test_the_superexec_reads_the_variable_that_we_set():
    from flwr.supercore.superexec import run_superexec

    assert run_superexec._TASK_POLL_INTERVAL_ENV == flower_internals.TASK_POLL_INTERVAL


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["in a database", "in memory"])
def test_a_run_s_process_has_minutes_to_start_and_no_other_takes_its_place(tmp_path, monkeypatch, kept):
    """Flower gives it 30 s until its first heartbeat, in which a busy machine does not import it."""
    from flwr.supercore.corestate import in_memory_corestate, sql_corestate
    from flwr.supercore.object_store import ObjectStoreFactory

    sql, memory = sql_corestate.SqlCoreState, in_memory_corestate.InMemoryCoreState
    for state in (sql, memory):
        monkeypatch.setattr(state, "claim_task", state.claim_task)
    allow_slow_starts(300)
    not_used = dict.fromkeys(("get_node_id", "store_message_and_object_tree"))
    base = sql if kept == "in a database" else memory
    made = type("State", (base,), not_used)  # the SuperLink's own has a federation
    place = [str(tmp_path / "state.db")] if base is sql else []
    state = made(*place, ObjectStoreFactory().store())
    if base is sql:
        state.initialize()
    task = state.create_task("flwr-serverapp", 1)
    token = state.claim_task(task)
    assert token is not None and state.claim_task(task) is None
    later = sql_corestate.now()
    for module in (sql_corestate, in_memory_corestate):
        monkeypatch.setattr(module, "now", lambda: later + sql_corestate.timedelta(seconds=290))
    assert state.activate_task(task)
    assert state.acknowledge_task_heartbeat(task)


def test_messages_and_arrays_keep_their_values_where_we_write_them():
    set_sender(node_id=0)
    message = Message(RecordDict(), dst_node_id=1, message_type="train")
    set_message_id(message, "7")
    other = copy_message(message, {"_dst_node_id": 2, "_src_node_id": 3, "_reply_to_message_id": "6"})
    assert (message.metadata.dst_node_id, message.metadata.message_id) == (1, "7")
    assert (other.metadata.dst_node_id, other.metadata.src_node_id) == (2, 3)
    assert other.metadata.reply_to_message_id == "6"
    assert other.content is message.content
    assert "_created_at" in message.metadata.__dict__
    assert Message(Error(code=0), reply_to=message).metadata.reply_to_message_id == "7"
    # LocalArray skips the constructor and sets these by itself.
    assert list(Array.__dataclass_fields__) == ["dtype", "shape", "stype", "data"]
