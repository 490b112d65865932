"""Settings: file, environment, flags in this order; every value checked; errors that say what to write instead."""

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvslot.allocator import PoolConfig
from kvslot.daemon import config
from kvslot.daemon.config import (
    ConfigError,
    PoolSettings,
    Settings,
    TenantSettings,
    changed,
    check_memory,
    default_socket,
    dump,
    load,
    parse_size,
    pool_config,
    pool_layout,
    pool_sum,
    read,
    strays,
)
from kvslot.daemon.device import MemoryInformation

LAYOUT = 'layout = { layers = 4, kv_heads = 2, head_dim = 64, dtype = "bf16" }'
POOL = f'[[pool]]\nsize = "64MiB"\n{LAYOUT}\n'
SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "torch_dtype": "bfloat16",
}


def written(folder: Path, text: str) -> Path:
    path = folder / "kvslot.toml"
    path.write_text(text)
    return path


def problems(folder: Path, text: str, environ: dict[str, str] | None = None, **flags: object) -> list[str]:
    """What is wrong with a file, as it is told."""
    with pytest.raises(ConfigError) as refused:
        load(written(folder, text), environ or {}, flags)
    assert str(refused.value) == "\n".join(refused.value.problems)
    return refused.value.problems


# -- where values come from ---------------------------------------------------------------------------------------


def test_defaults_are_the_cores() -> None:
    """A pool whose rules are not said has the core's own, but that the daemon evicts between requests."""
    settings = PoolSettings(
        blocks=100, layout=config.LayoutTable(layers=1, kv_heads=1, head_dim=8, dtype="fp16")
    )
    assert pool_config(settings, pool_layout(settings)) == PoolConfig(blocks=100, ahead=True)


def test_flags_over_environment_over_file(tmp_path: Path) -> None:
    """The last of file, environment and flags holds, each value for itself, and it is known which it was."""
    path = written(tmp_path, 'log_level = "error"\nsessions_max = 5\nslice_us = 100\n' + POOL)
    environ = {"KVSLOT_SESSIONS_MAX": "6", "KVSLOT_SLICE_US": "200", "KVSLOT_POOL_BLOCK_SIZE": "32"}
    found = read(path, environ, {"slice_us": "300", "socket": None})
    assert found.settings.log_level == "error"
    assert found.settings.sessions_max == 6
    assert found.settings.slice_us == 300
    assert found.settings.pools[0].block_size == 32
    assert found.settings.pools[0].size == 64 << 20
    assert found.origins["log_level"] == str(path)
    assert found.origins["sessions_max"] == "environment KVSLOT_SESSIONS_MAX"
    assert found.origins["slice_us"] == "flag --slice-us"
    assert found.origins["pool.default.block_size"] == "environment KVSLOT_POOL_BLOCK_SIZE"
    assert "stall_seconds" not in found.origins


def test_a_pool_without_a_file() -> None:
    """Environment and flags alone can describe the only pool."""
    flags = {"pool_blocks": 10, "pool_layout": {"layers": 1, "latent": 64, "dtype": "fp16"}}
    settings = load(None, {"KVSLOT_POOL_NAME": "one"}, flags)
    assert [(pool.name, pool.blocks) for pool in settings.pools] == [("one", 10)]


def test_one_of_several_replaces_its_like(tmp_path: Path) -> None:
    """Blocks from outside take the place of the file's size, and a model that of its layout."""
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    settings = load(
        written(tmp_path, POOL), {"KVSLOT_POOL_BLOCKS": "7", "KVSLOT_POOL_MODEL_CONFIG": str(tmp_path)}
    )
    pool = settings.pools[0]
    assert (pool.size, pool.blocks, pool.layout) == (0, 7, None)
    assert pool_sum(pool).slot_bytes == 23_040


def test_several_pools(tmp_path: Path) -> None:
    """Pools stand in the file's order, each with its own rules; from outside it is not clear which one is meant."""
    text = (
        POOL + '[[pool]]\nname = "two"\nblocks = 9\nblock_size = 4\nopaque_block_bytes = "64KiB"\nquota = 8\n'
    )
    settings = load(written(tmp_path, text), {})
    assert [(pool.name, pool.quota) for pool in settings.pools] == [("default", 0), ("two", 8)]
    assert pool_config(settings.pools[1], pool_layout(settings.pools[1])).opaque
    (problem,) = problems(tmp_path, text, {"KVSLOT_POOL_SIZE": "1GiB"})
    assert problem == (
        "environment KVSLOT_POOL_SIZE = '1GiB': there are 2 pools, so it is not clear which one: set it in the file"
    )


def test_paths_are_from_where_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in the file are taken from its folder, those from outside from the working folder."""
    inner, outer = tmp_path / "etc", tmp_path / "here"
    for folder in (inner, outer):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(SMOLLM2))
    text = 'socket = "k.sock"\n[[pool]]\nblocks = 9\nmodel_config = "config.json"\n'
    monkeypatch.chdir(outer)
    settings = load(written(inner, text), {})
    assert settings.socket == str(inner / "k.sock")
    assert settings.pools[0].model_config == str(inner / "config.json")
    settings = load(written(inner, text), {"KVSLOT_SOCKET": "k.sock"}, {"pool_model_config": "config.json"})
    assert settings.socket == str(outer / "k.sock")
    assert settings.pools[0].model_config == str(outer / "config.json")


def test_default_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's daemon listens in the user's runtime directory, root's in the system's."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert default_socket({"XDG_RUNTIME_DIR": "/run/user/1000"}) == "/run/user/1000/kvslot/kvslot.sock"
    assert default_socket({}) == "/run/kvslot/kvslot.sock"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_socket({"XDG_RUNTIME_DIR": "/run/user/0"}) == "/run/kvslot/kvslot.sock"
    assert load(None, {"XDG_RUNTIME_DIR": "/run/user/0"}).socket == "/run/kvslot/kvslot.sock"


def test_strays_are_named() -> None:
    """A variable that is nearly a setting is reported with the setting; others are somebody else's."""
    environ = {
        "KVSLOT_SOKET": "x",
        "KVSLOT_POOL_BLOCKSIZE": "8",
        "KVSLOT_TRACE_DIR": "y",
        "KVSLOT_SOCKET": "z",
    }
    assert strays(environ) == [
        "KVSLOT_POOL_BLOCKSIZE is not a setting: KVSLOT_POOL_BLOCK_SIZE is",
        "KVSLOT_SOKET is not a setting: KVSLOT_SOCKET is",
    ]


# -- what may be written ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("8G", 8 << 30),
        ("8GB", 8 * 1000**3),
        ("512MiB", 512 << 20),
        ("1.5KiB", 1536),
        ("2TiB", 2 << 40),
        ("100B", 100),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    """Sizes are bytes, or text with a unit: 1024s, unless it ends in a B without an i."""
    assert parse_size(text) == size


def test_modes_and_owners(tmp_path: Path) -> None:
    """Permissions may be an octal number or text; users and groups may be names."""
    for mode in ("0o640", '"0640"', '"640"', "416"):
        assert load(written(tmp_path, f"socket_mode = {mode}\n"), {}).socket_mode == 0o640
    settings = load(written(tmp_path, 'control_uids = ["root", 7, "8"]\ncontrol_gids = []\n'), {})
    assert settings.control_uids == (0, 7, 8)
    assert load(None, {"KVSLOT_CONTROL_UIDS": "root, 5"}).control_uids == (0, 5)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[[pol]]\nblocks = 4", "pol is not a setting: write [[pool]] for each pool"),
        ("[tenent]", "tenent is not a setting: write [[tenant]] for each tenant"),
        (
            "[daemon]\nsocket = 4",
            "daemon is no table there is: settings of the daemon stand above [[pool]] and [[tenant]]",
        ),
    ],
)
def test_a_mistyped_table_is_told_with_the_one_that_was_meant(tmp_path: Path, text: str, wanted: str) -> None:
    """Not with a list of all settings."""
    assert problems(tmp_path, text) == [f"{tmp_path / 'kvslot.toml'}: {wanted}"]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("sesions_max = 4", "sesions_max is not a setting: did you mean sessions_max"),
        ("block_size = 4", "block_size is a setting of a pool: put it below [[pool]]"),
        ("pools = 4", "pools is not a setting: write [[pool]] for each pool"),
        ('pool_size = "8GiB"', "pool_size is not a setting here: it is size, below [[pool]]"),
        ("pool-block-size = 8", "pool-block-size is not a setting here: it is block_size, below [[pool]]"),
        ("Drain-Seconds = 8", "Drain-Seconds is not a setting: did you mean drain_seconds"),
        ("model_confg = 4", "model_confg is not a setting: did you mean model_config, below [[pool]]?"),
        ("zzz = 4", "zzz is not a setting; those there are: socket, "),
        (
            "sessions_max = 0",
            "sessions_max = 0: out of range; allowed: whole numbers from 1 to 65536 sessions",
        ),
        ("sessions_max = 4.5", "sessions_max = 4.5: no whole number; allowed: "),
        ("sessions_max = true", "sessions_max = True: no whole number; allowed: "),
        ('sessions_max = "many"', "sessions_max = 'many': no whole number; allowed: "),
        ("stall_seconds = -1", "stall_seconds = -1: out of range; allowed: from 0.01 to 3600 seconds"),
        ("stall_seconds = nan", "stall_seconds = nan: out of range; allowed: "),
        ("stall_seconds = inf", "stall_seconds = inf: out of range; allowed: "),
        ('prefault = "maybe"', "prefault = 'maybe': neither true nor false; allowed: true or false"),
        ("prefault = 1", "prefault = 1: neither true nor false; allowed: true or false"),
        ("log_level = 3", "log_level = 3: unknown; allowed: one of 'debug', 'info', 'warning', 'error'"),
        ('log_level = "warn"', "did you mean 'warning'?"),
        ("log_level = []", "log_level = []: unknown; allowed: "),
        ('frame_bytes = "8XB"', "frame_bytes = '8XB': no size; allowed: 4 KiB to 256 MiB, in bytes or as "),
        ("frame_bytes = 1.5", "frame_bytes = 1.5: no size; allowed: "),
        ("frame_bytes = 1", "frame_bytes = 1: out of range; allowed: 4 KiB to 256 MiB"),
        ("socket = 4", "socket = 4: no text; allowed: a path; put it in quotes"),
        ("socket_mode = 660", "permission bits are octal: write 0o660"),
        ("socket_mode = 0o1777", "socket_mode = 1023: out of range"),
        ("socket_mode = 0o060", "the daemon's own user could not connect"),
        ('control_uids = ["no such user"]', "there is no user 'no such user' on this machine"),
        ("control_gids = [-1]", "-1 is no id"),
        ("control_gids = 5", "no list"),
        ('socket_group = "no such group"', "there is no such group on this machine; create it (groupadd)"),
        (f'socket = "/{"x" * 110}"', "111 bytes, and the kernel takes paths of up to 103 here"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, line: str, wanted: str) -> None:
    """A wrong value is told with its file, key, value, what is allowed, and what to write instead."""
    (problem,) = problems(tmp_path, line + "\n")
    assert problem.startswith(f"{tmp_path / 'kvslot.toml'}: {line.partition(' ')[0]}")
    assert wanted in problem


@pytest.mark.parametrize(
    ("pool", "wanted"),
    [
        (f"size = 1\n{LAYOUT}", "pool[0] size = 1: out of range; allowed: 4 KiB to 64 TiB"),
        (LAYOUT, "pool[0] 'default': neither size nor blocks is given; write one of them"),
        (f'size = "1MiB"\nblocks = 9\n{LAYOUT}', "both size and blocks are given"),
        ("blocks = 9", "what a slot holds is not given; write one of model_config, layout, opaque_block_bytes"),
        (f"blocks = 9\nopaque_block_bytes = 64\n{LAYOUT}", "layout and opaque_block_bytes are given; write one"),
        (f'size = "8KiB"\n{LAYOUT}', "give at least 64 KiB"),
        (f"blocks = 2\nblock_size = 1\n{LAYOUT}", "blocks = 2: a pool needs 3, padding included"),
        (f"blocks = 2147483647\n{LAYOUT}", "kernels address fewer than 2^31"),
        (f"blocks = 9\nblock_sise = 3\n{LAYOUT}", "block_sise is not a setting: did you mean block_size"),
        (f"blocks = 9\nsocket = 's'\n{LAYOUT}", "pool[0] socket is a setting of the daemon, for all pools: put it"),
        (f"blocks = 9\nname = 'a/b'\n{LAYOUT}", "name: letters, digits, '.', '_' and '-' are allowed"),
        (f"blocks = 9\n{LAYOUT}\n[[pool]]\nblocks = 9\n{LAYOUT}", "pool[1] 'default': name: another pool is called so"),
        ("blocks = 9\nlayout = 5", "pool[0] layout = 5: no table; allowed: a table; write layout = { layers"),
        ("blocks = 9\nlayout = { layer = 5 }", "layout.layer is not a setting: did you mean layers?"),
        ("blocks = 9\nlayout = { layers = 5 }", "layout has no dtype: add dtype"),
        ("blocks = 9\nlayout = { layers = 5, dtype = 'bf61', latent = 4 }", "dtype 'bf61' is not known"),
        ("blocks = 9\ndtype = 'bf16'\nlayout = { layers = 5 }", "give either kv_heads and head_dim, or latent"),
        ("blocks = 9\ndtype = 'bf16'\nlayout = { layers = 5, dtype = 'fp8', latent = 4 }", "write one of them"),
        ("blocks = 9\ndtype = 'bf16'\nlayout = { kv_heads = 5, head_dim = 4 }", "layers = 0 is no whole number"),
        ("blocks = 9\ndtype = 'bf16'\nopaque_block_bytes = 64", "opaque blocks have none; leave it out"),
        ("blocks = 9\nopaque_block_bytes = 100", "round it up to 112"),
        ("blocks = 9\nmodel_config = 'none.json'", "none.json': cannot be read: No such file or directory"),
        ("blocks = 9\nmodel_config = 'kvslot.toml'", "kvslot.toml': not JSON: "),
        (f"blocks = 9\neviction = 'lrux'\n{LAYOUT}", "one of 'gaps', 'lru', 's3fifo'; did you mean 'lru'?"),
        (f"blocks = 9\nwatermark = 2\n{LAYOUT}", "watermark = 2: out of range; allowed: from 0 to 0.9"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_pool_is_told(tmp_path: Path, pool: str, wanted: str) -> None:
    """The same for pools: what is missing, what contradicts itself, what their memory does not suffice for."""
    found = problems(tmp_path, f"[[pool]]\n{pool}\n")
    assert wanted in "\n".join(found)
    assert all(each.startswith(str(tmp_path / "kvslot.toml")) for each in found)


def test_every_problem_is_told(tmp_path: Path) -> None:
    """All that is wrong is told at once, from every source."""
    found = problems(
        tmp_path,
        "sessions_max = 0\nbatch_max = 0\n[[pool]]\nblock_size = 9000\nlayout = { layers = -1, heads = 2 }\n",
        {"KVSLOT_SLICE_US": "x"},
        log_level="loud",
    )
    told = (
        "sessions_max",
        "batch_max",
        "slice_us",
        "log_level",
        "pool[0] block_size",
        "layout.layers",
        "layout.heads",
    )
    assert len(found) == len(told)
    assert all(any(name in each for each in found) for name in told)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"socket = ", "not TOML: Invalid value"),
        (b"\xff\xfe", "not TOML: "),
        (b"a = 1\na = 2", "not TOML: Cannot overwrite a value"),
        (b"#" * ((1 << 20) + 1), "more than 1 MiB"),
        (b"pool = 4", "pool is no table: write [[pool]]"),
        (b"[[pool]]\nblocks=9\n" * 65, "65 pools: up to 64 are allowed"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: bytes, wanted: str) -> None:
    """A file that is no configuration is refused by name, with where it goes wrong."""
    path = tmp_path / "kvslot.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(wanted)) as refused:
        load(path, {})
    assert str(refused.value).startswith(str(path))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, and a folder in its place, are refused with the system's reason."""
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            load(path, {})


VALUES = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers() | st.text(max_size=3), max_size=2),
    st.dictionaries(st.sampled_from([*config.LAYOUT]), st.integers() | st.text(max_size=3), max_size=3),
)
KEYS = [*config.SETTINGS, *(f"pool_{key}" for key in config.POOL)]


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6))
def test_any_values_are_settings_or_a_refusal(values: dict[str, Any]) -> None:
    """Whatever is given, it is settings that can be used or a ConfigError, nothing else."""
    try:
        settings = load(None, {}, values)
    except ConfigError:
        return
    for each in settings.pools:
        pool_sum(each)


# -- what it comes to ---------------------------------------------------------------------------------------------


def test_a_size_comes_to_whole_blocks(tmp_path: Path) -> None:
    """A pool takes as many whole blocks as its size has room for, the gaps between planes included."""
    (pool,) = load(written(tmp_path, POOL), {}).pools
    total = pool_sum(pool)
    assert total.slot_bytes == 2048
    assert total.planes == 8
    assert total.blocks == 2048
    assert total.slots == 2048 * 16
    assert total.usable == 2047 * 16
    assert total.size_bytes == 64 << 20
    assert total.fingerprint == pool_layout(pool).fingerprint


def test_windowed_is_the_models_unless_said() -> None:
    """Whether fronts may be forgotten is the model's, unless the pool says otherwise."""
    layout = msgspec.structs.replace(
        pool_layout(PoolSettings(layout=config.LayoutTable(layers=1, latent=8, dtype="fp16"))), windowed=True
    )
    assert pool_config(PoolSettings(blocks=9), layout).windowed
    assert not pool_config(PoolSettings(blocks=9, windowed=False), layout).windowed


def test_memory_of_all_pools_together(tmp_path: Path) -> None:
    """Pools that fit alone and not together are refused, with what each wants and what there is."""
    second = POOL.replace("[[pool]]", '[[pool]]\nname = "two"')
    sums = [pool_sum(pool) for pool in load(written(tmp_path, POOL + second), {}).pools]
    check_memory(sums, MemoryInformation(total_bytes=1 << 30, free_bytes=128 << 20))
    with pytest.raises(ConfigError) as refused:
        check_memory(sums, MemoryInformation(total_bytes=1 << 30, free_bytes=127 << 20))
    assert str(refused.value) == (
        "the pools want 128 MiB (default 64 MiB, two 64 MiB), and 127 MiB of 1 GiB memory are free: "
        "make them smaller, or free memory first"
    )


def test_dump_says_the_same_again(tmp_path: Path) -> None:
    """What `--check-config` prints is a configuration, and comes to the same settings."""
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    text = (
        'socket = "s"\ncontrol_uids = [7]\nstall_seconds = 0.5\nprefault = false\nsocket_mode = 0o600\n'
        'frame_bytes = "3MiB"\nreply_bytes = 5000\n'
        + POOL
        + '[[pool]]\nname = "b"\nsize = "3GiB"\nmodel_config = "config.json"\ndtype = "fp8"\nscales = false\n'
        + '[[pool]]\nname = "c"\nblocks = 9\nopaque_block_bytes = 1600\nwindowed = true\nquota = 5\n'
    )
    found = read(written(tmp_path, text), {})
    shown = dump(found, [pool_sum(pool) for pool in found.settings.pools])
    assert "131,072 slots" not in shown
    assert "# b: llama, float8_e4m3fn" in shown
    assert "11,520 bytes per token in 60 planes" in shown
    again = written(tmp_path, shown)
    assert load(again, {}) == found.settings
    assert "default" in shown
    assert str(tmp_path / "kvslot.toml") in shown


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    """What contradicts another value is told beside what is wrong by itself, and nothing that only follows from it."""
    found = problems(
        tmp_path,
        "sessions_max = 0\ncompaction_stop = 0.5\n"
        f"[[pool]]\nname = 'a'\nsize = 1\n{LAYOUT}\n[[pool]]\nname = 'b'\n{LAYOUT}\n",
    )
    for wanted in (
        "sessions_max = 0: ",
        "compaction_stop = 0.5 is more than",
        "pool[0] size = 1",
        "pool[1] 'b': neither size",
    ):
        assert sum(wanted in each for each in found) == 1, wanted
    assert len(found) == 4
    (alone,) = problems(tmp_path, "compaction_start = 7\ncompaction_stop = 0.5\n")
    assert "compaction_start = 7: out of range" in alone


def test_changed() -> None:
    """One setting can be changed by text, under its rule."""
    settings = load(None, {})
    assert changed(settings, "stall_seconds", "2.5") == msgspec.structs.replace(settings, stall_seconds=2.5)
    with pytest.raises(
        ConfigError, match=r"^stall_seconds = '-1': out of range; allowed: from 0\.01 to 3600"
    ):
        changed(settings, "stall_seconds", "-1")
    with pytest.raises(ConfigError, match="did you mean stall_seconds"):
        changed(settings, "stal_seconds", "1")
    config.check_changeable("stall_seconds")
    for name, wanted in (
        (
            "compaction_chunk_bytes",
            r"KVSLOT_COMPACTION_CHUNK_BYTES, and start the daemon anew; these can be changed: log_l",
        ),
        ("quota", r"^quota is a setting of a pool, which is made once: set it in the file"),
    ):
        with pytest.raises(ConfigError, match=wanted) as raised:
            config.check_changeable(name)
        assert "did you mean" not in str(raised.value)


def test_every_setting_has_a_rule_that_its_default_keeps() -> None:
    """Each field has a rule with a text, each number a unit or a bare share, and defaults are within their ranges."""
    for struct, rules in (
        (Settings, config.SETTINGS), (PoolSettings, config.POOL), (TenantSettings, config.TENANT),
    ):  # fmt: skip
        fields = {field.name: field.default for field in msgspec.structs.fields(struct)}
        for tables in ("pools", "tenants"):
            fields.pop(tables, None)
        assert set(rules) == set(fields)
        for name, rule in rules.items():
            assert rule.text
            assert rule.allowed()
            if rule.kind in ("whole", "real"):
                assert rule.low < rule.high
                assert rule.low <= fields[name] <= rule.high or name == "blocks"
            if rule.kind == "choice":
                assert fields[name] in rule.choices


def test_the_documentation_knows_every_setting() -> None:
    """docs/daemon.md has a row for each setting, with its default, range and text."""
    text = (Path(__file__).parents[2] / "docs" / "daemon.md").read_text(encoding="utf-8")
    missing = [row for row in config.documentation() if row not in text]
    assert missing == []


def test_the_documentation_knows_what_can_be_changed() -> None:
    """docs/daemon.md names every setting that a daemon takes over while it runs, and none that it does not."""
    text = (Path(__file__).parents[2] / "docs" / "daemon.md").read_text(encoding="utf-8")
    start = text.index("`log_level`, `stall_seconds`")
    named = set(re.findall(r"`([a-z_]+)`", text[start : text.index("\n## Pools", start)]))
    told = {*config.CHANGEABLE, *config.RELOADABLE, *config.RETRIED} - {"tenants"}
    # Of compaction it says that all can be, but for its chunks.
    told -= {each for each in config.CHANGEABLE if each.startswith("compaction")}
    assert "[[tenant]]" in text[start:]
    assert named & set(config.SETTINGS) == told


def test_the_example_is_a_configuration() -> None:
    """What a daemon without configuration proposes is one."""
    from kvslot.daemon.main import EXAMPLE

    tree = tomllib.loads(EXAMPLE)
    assert set(tree) - {"pool"} <= set(config.SETTINGS)
    assert set(tree["pool"][0]) <= set(config.POOL)
