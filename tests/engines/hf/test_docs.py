"""docs/integrations/hf.md and examples/hf.py against the code."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WITHOUT = "torch and transformers are not installed: pip install 'kvslot[hf]'"
torch: Any = pytest.importorskip("torch", reason=WITHOUT)
transformers: Any = pytest.importorskip("transformers", reason=WITHOUT)

from kvslot.engines import hf  # noqa: E402
from kvslot.engines.hf import PoolCache, shape_of  # noqa: E402

from ...tools.daemon import Running, running  # noqa: E402
from ..tools import pool_for, pooled, tiny, tokens  # noqa: E402

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "integrations" / "hf.md").read_text(encoding="utf-8")
PROMPTS = ["How far is the Moon?", "How far is the Sun from here?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer, whose tokens are bytes."""
    tokenizers: Any = importlib.import_module("tokenizers")  # comes with transformers
    path = tmp_path_factory.mktemp("model")
    tiny().save_pretrained(path)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    plain = tokenizers.Tokenizer(tokenizers.models.BPE({each: n for n, each in enumerate(alphabet)}, []))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token=alphabet[0])
    tokenizer.chat_template = (
        "You are kind. {% for each in messages %}{{ each.content }}{% endfor %} And so: "
    )
    tokenizer.save_pretrained(path)
    return path


def test_the_first_program() -> None:
    """The page's program, in two clients' lives."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    model, ids = tiny(), tokens(30)
    want = model.generate(ids, max_new_tokens=64, do_sample=False)
    with pooled(model) as daemon:
        for hit in (0, 29):
            names: dict[str, Any] = {"model": model, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
            exec(program.replace("Client(", f"Client({str(daemon.socket)!r}, "), names)
            assert names["cache"].hits == [hit]
            assert torch.equal(names["out"], want)
            names["client"].close()


def test_what_is_named_is_there() -> None:
    """Parameters as the page gives them, and every error and attribute that it names."""
    (signature,) = re.findall(r"`PoolCache\((.*)\)`", PAGE)
    parameters = list(inspect.signature(PoolCache).parameters.values())
    shown = [
        str(each.name) if each.default is each.empty else f"{each.name}={each.default!r}".replace("'", '"')
        for each in parameters
    ]
    shown.insert(4, "*")
    assert signature == ", ".join(shown)
    for name in ("PoolCache", "Preempted", "LayoutMismatch"):
        assert hasattr(hf, name)
    for name in ("hits", "hit", "computed", "published", "sequences"):
        assert f"`{name}`" in PAGE


def test_the_pool_that_the_command_prints(folder: Path) -> None:
    """It is what the daemon takes, and what the model needs."""
    printed = _python("-Im", "kvslot.engines.hf", str(folder), "--size", "4MiB", "--dtype", "float32")
    assert printed == shape_of(tiny()).toml(size="4MiB")
    file = folder / "kvslot.toml"
    file.write_text(printed)
    _python("-Im", "kvslot.daemon", "--config", str(file), "--check-config")


def _python(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _example(folder: Path, socket: Path) -> list[tuple[str, int]]:
    """What the example says, and how many tokens were cached."""
    said = _python("-I", str(ROOT / "examples" / "hf.py"), "--socket", str(socket), str(folder), *PROMPTS)
    parts = re.split(r"^  \((\d+) of \d+ tokens were cached\)$", said, flags=re.MULTILINE)
    return [(text, int(hit)) for text, hit in zip(parts[::2], parts[1::2], strict=False)]


def test_the_example(folder: Path, tmp_path: Path) -> None:
    """Without a daemon, fresh, and again: the same words each time."""
    alone = _example(folder, tmp_path / "nobody")
    assert [hit for _, hit in alone] == [0, 0]
    with pooled(tiny()) as daemon:
        first = _example(folder, daemon.socket)
        again = _example(folder, daemon.socket)
    shared = len("You are kind. How far is the ")
    assert [hit for _, hit in first] == [0, shared]
    assert [hit for _, hit in again] == [len(f"You are kind. {each} And so: ") - 1 for each in PROMPTS]
    assert {text for text, _ in first} == {text for text, _ in again} == {text for text, _ in alone}


def test_the_example_goes_on_without_its_daemon(folder: Path, tmp_path: Path) -> None:
    """Killed in mid-answer, away, and there again: each answer is right."""
    spec = importlib.util.spec_from_file_location("example_hf", ROOT / "examples" / "hf.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    socket, pool = tmp_path / "s", pool_for(tiny())
    engine = example.Engine(str(folder), str(socket), "")
    want, count, hit = engine.answer(PROMPTS[0], 40)
    assert hit == 0
    with running(pools=[pool], socket=socket, code=None) as daemon:
        assert engine.answer(PROMPTS[0], 40) == (want, count, 0)
        assert engine.answer(PROMPTS[0], 40) == (want, count, count - 1)
        hook = engine.model.register_forward_hook(_kills(daemon, 20))
        assert engine.answer(PROMPTS[0], 40)[0] == want
        hook.remove()
        assert engine.answer(PROMPTS[0], 40) == (want, count, 0)  # nobody there
    with running(pools=[pool], socket=socket):
        assert engine.answer(PROMPTS[0], 40) == (want, count, 0)
        assert engine.answer(PROMPTS[0], 40) == (want, count, count - 1)
        engine.close()


def _kills(daemon: Running, calls: int) -> Any:
    left = [calls]

    def hook(*_: object) -> None:
        left[0] -= 1
        if not left[0]:
            daemon.process.kill()
            daemon.process.wait()

    return hook


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--size", "12xx"], "'12xx' is no size"),
        (["--dtype", "float33"], "invalid choice: 'float33'"),
        ([], "has no configuration of a model"),
    ],
)
def test_wrong_words_for_a_configuration(tmp_path: Path, words: list[str], told: str) -> None:
    """What cannot be is refused in a line, exit code 2, and nothing is printed that the daemon would refuse."""
    done = subprocess.run(
        [sys.executable, "-Im", "kvslot.engines.hf", str(tmp_path), *words],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout
