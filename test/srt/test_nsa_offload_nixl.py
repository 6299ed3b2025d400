"""Memory types on the nixl wire: what is registered, what is sent, what is described, and who is refused."""

import struct
from collections import namedtuple
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import requests

from sglang.srt.disaggregation import kv_memory_types
from sglang.srt.disaggregation.base.conn import KVPoll, StateType
from sglang.srt.disaggregation.nixl import conn

GPU = 3
PAGE_BYTES = 64 * 656
Call = namedtuple("Call", "what memory_type regions")


class Agent:
    """Records an agent's calls."""

    name = "agent"

    def __init__(self):
        self.calls = []

    def register_memory(self, regions, memory_type):
        self.calls.append(Call("register", memory_type, [tuple(r) for r in regions]))
        return ["descs"]

    def get_xfer_descs(self, regions, memory_type):
        self.calls.append(Call("describe", memory_type, [tuple(int(n) for n in r) for r in regions]))
        return ["descs"]

    def initialize_xfer(self, *args):
        return "handle"

    def transfer(self, handle):
        return "PROC"

    def get_agent_metadata(self):
        return b"metadata"


def manager(types=None):
    """A manager's attributes after its construction, without sockets or threads."""
    made = object.__new__(conn.NixlKVManager)
    made.agent = Agent()
    made.is_mla_backend = True
    made.attn_tp_size = 1
    made.enable_staging = False
    made.local_ip, made.rank_port = "127.0.0.1", 1234
    made.failure_records, made.request_status = {}, {}
    made.failure_lock = mock.MagicMock()
    made.kv_args = SimpleNamespace(
        engine_rank=0,
        gpu_id=GPU,
        kv_data_ptrs=[1 << 20, 2 << 20],
        kv_data_lens=[1 << 19, 1 << 19],
        kv_item_lens=[PAGE_BYTES, PAGE_BYTES],
        aux_data_ptrs=[3 << 20],
        aux_data_lens=[64],
        state_types=[StateType.NSA],
        state_data_ptrs=[[4 << 20]],
        state_data_lens=[[1 << 19]],
        state_item_lens=[[64 * 132]],
    )
    if types is not None:
        made.kv_args.kv_memory_types = types
    return made


def registration(sender):
    """The message that a decode node registers with, without its guard."""
    sent = []
    receiver = object.__new__(conn.NixlKVReceiver)
    receiver.kv_mgr = sender
    receiver.bootstrap_infos = [{}]
    socket = SimpleNamespace(send_multipart=sent.extend)
    receiver._connect_to_bootstrap_server = lambda info: (socket, mock.MagicMock())
    receiver._register_kv_args()
    return sent[1:]


def send(info, indices=(5, 6)):
    """The prefill node's descriptors of latent rows and of index keys: (source, destination) of each."""
    node = manager()
    pages = np.array(indices, dtype=np.int32)
    node.send_kvcache(
        "peer",
        pages,
        info.dst_kv_ptrs,
        pages + 1,
        info.gpu_id,
        "notif",
        dst_memory_type=kv_memory_types.common_memory_type(info.kv_memory_types),
    )
    node.maybe_send_extra("peer", [[5, 6]], info.dst_state_data_ptrs, [[6, 7]], info.gpu_id, "notif", 1)
    rows, keys = node.agent.calls[:2], node.agent.calls[2:]
    return rows, keys


def test_host_rows_are_registered_as_dram_and_the_rest_as_before():
    node = manager(["DRAM", "DRAM"])
    node.register_buffer_to_engine()
    rows, aux, keys = node.agent.calls
    assert rows == Call("register", "DRAM", [(1 << 20, 1 << 19, 0, ""), (2 << 20, 1 << 19, 0, "")])
    assert (aux.memory_type, keys.memory_type) == ("DRAM", "VRAM")
    assert keys.regions == [(4 << 20, 1 << 19, GPU, "")]


def test_each_pointer_is_registered_under_its_own_type():
    node = manager(["DRAM", "VRAM"])
    node.register_buffer_to_engine()
    assert node.agent.calls[0] == Call("register", "VRAM", [(2 << 20, 1 << 19, GPU, "")])
    assert node.agent.calls[1] == Call("register", "DRAM", [(1 << 20, 1 << 19, 0, "")])


def test_a_failed_registration_of_either_type_is_seen():
    node = manager(["DRAM", "VRAM"])
    register = node.agent.register_memory
    node.agent.register_memory = lambda regions, kind: None if kind == "DRAM" else register(regions, kind)
    with pytest.raises(Exception, match="registration failed for kv"):
        node.register_buffer_to_engine()


def test_without_types_everything_is_as_in_the_base():
    node = manager()
    node.register_buffer_to_engine()
    assert node.agent.calls[0] == Call("register", "VRAM", [(1 << 20, 1 << 19, GPU, ""), (2 << 20, 1 << 19, GPU, "")])
    rows, _ = send(conn.KVArgsRegisterInfo.from_zmq(registration(node)))
    assert [call.memory_type for call in rows] == ["VRAM", "VRAM"]
    assert {region[2] for region in rows[1].regions} == {GPU}


def test_types_reach_the_descriptors_of_the_prefill_node():
    info = conn.KVArgsRegisterInfo.from_zmq(registration(manager(["DRAM", "DRAM"])))
    rows, keys = send(info)
    assert [call.memory_type for call in rows] == ["VRAM", "DRAM"]
    assert rows[0].regions[0] == ((1 << 20) + 5 * PAGE_BYTES, 2 * PAGE_BYTES, GPU)
    assert rows[1].regions == [
        ((1 << 20) + 6 * PAGE_BYTES, 2 * PAGE_BYTES, 0),
        ((2 << 20) + 6 * PAGE_BYTES, 2 * PAGE_BYTES, 0),
    ]
    assert [call.memory_type for call in keys] == ["VRAM", "VRAM"]
    assert {region[2] for call in keys for region in call.regions} == {GPU}


def test_the_field_is_the_last_and_an_older_node_lacks_it():
    message = registration(manager(["DRAM", "DRAM"]))
    assert message[16] == b"DD" and len(message) == 17
    older = conn.KVArgsRegisterInfo.from_zmq(message[:16])
    assert older.kv_memory_types == b""
    assert kv_memory_types.common_memory_type(older.kv_memory_types) == "VRAM"
    assert older.staging is None
    staging = message[:14] + [struct.pack("Q", 77), b"5", b"DD"]
    parsed = conn.KVArgsRegisterInfo.from_zmq(staging)
    assert (parsed.staging.base_ptr, parsed.staging.total_size, parsed.kv_memory_types) == (77, 5, b"DD")


@pytest.mark.parametrize("field", [b"DV", b"X"])
def test_types_that_one_list_cannot_hold_are_refused(field):
    with pytest.raises(ValueError, match="one known type"):
        kv_memory_types.common_memory_type(field)


def test_a_draft_models_pointers_are_device_memory():
    host = SimpleNamespace(get_contiguous_buf_memory_types=lambda: ["DRAM", "DRAM"])
    assert kv_memory_types.kv_memory_types(host, 3) == ["DRAM", "DRAM", "VRAM"]
    assert kv_memory_types.kv_memory_types(object(), 2) == ["VRAM", "VRAM"]


# -- stock prefill nodes -------------------------------------------------------------------------------------------------


def receiver_of(node):
    made = object.__new__(conn.NixlKVReceiver)
    made.kv_mgr = node
    made.bootstrap_addr, made.bootstrap_room = "10.0.0.1:8998", 7
    made.prefill_info = SimpleNamespace()
    made.conclude_state = None
    node.request_status[7] = KVPoll.Bootstrapping
    return made


def set_up(receiver, status):
    """Runs the set-up with the bootstrap server answering ``status``; returns (base set-up was run, requests sent)."""
    answer = mock.Mock(side_effect=status) if isinstance(status, Exception) else mock.Mock()
    answer.return_value = SimpleNamespace(status_code=status)
    base = mock.Mock()
    with mock.patch.object(requests, "get", answer):
        with mock.patch.object(conn.CommonKVReceiver, "_setup_bootstrap_infos", base):
            receiver._setup_bootstrap_infos()
    return base.called, answer.call_count


def test_a_stock_prefill_node_is_refused_by_name():
    receiver = receiver_of(manager(["DRAM", "DRAM"]))
    assert set_up(receiver, 404) == (False, 1)
    assert receiver.conclude_state == KVPoll.Failed
    assert receiver.kv_mgr.request_status[7] == KVPoll.Failed
    with pytest.raises(RuntimeError, match="Prefill node 10.0.0.1:8998 is refused.*enable-decode-nsa-kv-offload"):
        receiver.failure_exception()


def test_a_refused_node_is_asked_again():
    receiver = receiver_of(manager(["DRAM", "DRAM"]))
    set_up(receiver, 404)
    assert set_up(receiver, 404) == (False, 1)


def test_a_node_that_does_not_answer_fails_the_request():
    receiver = receiver_of(manager(["DRAM", "DRAM"]))
    assert set_up(receiver, requests.ConnectionError("gone")) == (False, 1)
    with pytest.raises(RuntimeError, match="did not say"):
        receiver.failure_exception()


def test_a_patched_prefill_node_is_asked_once():
    receiver = receiver_of(manager(["DRAM", "DRAM"]))
    assert set_up(receiver, 200) == (True, 1)
    assert set_up(receiver, 200) == (True, 0)


def test_nobody_is_asked_where_all_rows_are_on_the_device():
    assert set_up(receiver_of(manager(["VRAM", "VRAM"])), 404) == (True, 0)
    assert set_up(receiver_of(manager()), 404) == (True, 0)


def test_the_bootstrap_server_has_the_route():
    server = object.__new__(conn.NixlKVBootstrapServer)
    server.app = mock.Mock()
    server._setup_routes()
    assert kv_memory_types.ROUTE in [call.args[0] for call in server.app.router.add_get.call_args_list]
