"""A vLLM process that a test drives: commands go in as lines of JSON, answers come out.  Runs as a script, too.

generate   prompts of token ids, all at once; gives tokens, cached tokens, first log probabilities and seconds
run        Python, with `llm`, `core` (vLLM's), `scheduler`, `planner` and `worker` (ours) at hand; gives `answer`
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all threads of all processes stand on one core
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "TOKENIZERS_PARALLELISM": "false",
}

BLOCK = 32

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY_BLOCK_BYTES = 2 * 1 * 2 * 32 * BLOCK * 4


def tiny_model(folder: Path, **changes: object) -> Path:
    """A two-layer Llama's configuration; its weights are vLLM's dummy ones, the same in every process."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY, **changes}))
    return folder


class Engine:
    """The parent's side."""

    def __init__(
        self, log: Path, model: Path, *, connector: dict[str, Any] | None = None, env: dict[str, str] | None = None,
        kv_load_failure_policy: str = "fail", **llm: Any,
    ) -> None:  # fmt: skip
        """Starts vLLM and waits until it is there.  `connector`: its extra configuration; None: without kvslot."""
        options: dict[str, Any] = {
            "model": str(model),
            "enforce_eager": True,
            "dtype": "float32",
            "max_model_len": 2048,
            "block_size": BLOCK,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            **llm,
        }
        if connector is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "KvslotConnector",
                "kv_connector_module_path": "kvslot.engines.vllm.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": connector,
                "kv_load_failure_policy": kv_load_failure_policy,
            }
        self.log = log
        with log.open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env={**os.environ, **ENVIRONMENT, **(env or {})},
                text=True,
            )
        self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        code = self.process.wait()
        self.close()
        raise AssertionError(f"vLLM ended with {code}:\n{self.text()[-6000:]}")

    def text(self) -> str:
        """What it has logged."""
        return self.log.read_text(errors="replace")

    def send(self, **command: Any) -> None:
        """A command whose answer is read later, or never."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def call(self, **command: Any) -> Any:
        """A command's answer."""
        self.send(**command)
        answer = self._read()
        if isinstance(answer, dict) and "error" in answer:
            raise AssertionError(answer["error"])
        return answer

    def generate(self, *prompts: list[int], tokens: int = 8, **more: Any) -> list[dict[str, Any]]:
        """Greedy output for each prompt.  `salt`, `adapter` (name, number, folder) hold for all."""
        answer: list[dict[str, Any]] = self.call(do="generate", prompts=list(prompts), tokens=tokens, **more)
        return answer

    def run(self, code: str) -> Any:
        """Runs Python there; what it leaves in `answer`."""
        return self.call(do="run", code=code)

    def statistics(self) -> dict[str, int]:
        """Of the planner."""
        answer: dict[str, int] = self.run(
            "import dataclasses; answer = dataclasses.asdict(planner.statistics())"
        )
        return answer

    def close(self) -> None:
        """Ends it."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        if self.process.poll() is None:
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def child() -> None:
    """The engine's side."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer

    def say(answer: object) -> None:
        out.write("@" + json.dumps(answer, default=str) + "\n")
        out.flush()

    transfer = importlib.import_module("vllm.distributed.kv_transfer")
    llm = importlib.import_module("vllm").LLM(**json.loads(sys.argv[1]))
    core: Any = getattr(llm.llm_engine.engine_core, "engine_core", None)
    scheduler = core.scheduler if core is not None else None
    planner = scheduler.connector._planner if scheduler is not None and scheduler.connector else None
    worker = transfer.get_kv_transfer_group()._worker if transfer.has_kv_transfer_group() else None
    names: dict[str, Any] = {
        "llm": llm, "core": core, "scheduler": scheduler, "planner": planner, "worker": worker,
        "threading": threading, "generate": lambda **command: _generate(llm, command),
    }  # fmt: skip
    say("ready")
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["do"] == "generate":
                say(_generate(llm, command))
            else:
                names["answer"] = None
                exec(command["code"], names)
                say(names["answer"])
        except Exception as error:  # noqa: BLE001 - it is the parent's to raise
            say({"error": f"{error}\n{traceback.format_exc()}"})


def _generate(llm: Any, command: dict[str, Any]) -> list[dict[str, Any]]:
    vllm = importlib.import_module("vllm")
    tokens_prompt = importlib.import_module("vllm.inputs").TokensPrompt
    lora_request = importlib.import_module("vllm.lora.request").LoRARequest
    salt = {"cache_salt": command["salt"]} if command.get("salt") else {}
    adapter = command.get("adapter")
    prompts = [tokens_prompt(prompt_token_ids=each, **salt) for each in command["prompts"]]
    start = time.perf_counter()
    outputs = llm.generate(
        prompts,
        vllm.SamplingParams(temperature=0, max_tokens=command.get("tokens", 8), ignore_eos=True, logprobs=0),
        use_tqdm=False,
        lora_request=lora_request(adapter[0], adapter[1], adapter[2]) if adapter else None,
    )
    seconds = time.perf_counter() - start
    return [
        {
            "tokens": list(each.outputs[0].token_ids),
            "cached": each.num_cached_tokens,
            "logprob": next(iter(each.outputs[0].logprobs[0].values())).logprob,
            "reason": each.outputs[0].finish_reason,
            "seconds": seconds,
        }
        for each in outputs
    ]


if __name__ == "__main__":
    child()
