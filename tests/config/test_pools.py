"""Several pools in one running daemon: each its own layout and memory, as the configuration says."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvslot import Client
from kvslot.api.wire import Refused

from ..tools.daemon import running

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "torch_dtype": "bfloat16",
}
MLA = {"layers": 3, "latent": 80, "dtype": "fp8"}


def test_pools_of_different_layouts(tmp_path: Path) -> None:
    """A client maps the pool it asked for, finds its planes where they were said to be, and writes into no other."""
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    pools = [
        {"name": "gqa", "size": "4MiB", "model_config": tmp_path},
        {"name": "mla", "blocks": 64, "layout": MLA},
        {"name": "whole", "blocks": 64, "opaque_block_bytes": "16KiB"},
    ]
    first = {"gqa": "0.k", "mla": "0.kv", "whole": "blocks"}
    with running(pools=pools) as daemon, ExitStack() as stack:
        clients = {name: stack.enter_context(Client(str(daemon.socket), pool=name)) for name in first}
        for mark, (name, client) in enumerate(clients.items(), 1):
            client.pool.plane(first[name])[5] = mark
        for mark, (name, client) in enumerate(clients.items(), 1):
            assert (client.pool.plane(first[name])[5] == mark).all()
            assert not client.pool.plane(first[name])[6].any()
        assert clients["gqa"].pool.plane("0.k").shape[1:] == (3, 64)
        assert clients["mla"].pool.plane("0.kv").shape == (64 * 16, 80)
        assert clients["mla"].pool.plane("0.kv.scale").shape == (64 * 16, 1)
        assert clients["whole"].pool.plane("blocks").shape == (64 * 16, 1024)
        assert len(clients["gqa"].pool.planes) == 60
        assert clients["gqa"].pool.description.size_bytes <= 4 << 20
        with pytest.raises(Refused, match="other"):
            Client(str(daemon.socket), pool="other")
    assert not daemon.socket.exists()
