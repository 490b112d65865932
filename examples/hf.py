"""A transformers model on a kvslot pool: what any process on it has computed of a prompt is not computed again.

    MODEL=$(python -m kvslot.engines.hf.model)
    python -m kvslot.engines.hf $MODEL --dtype float32 --size 1GiB > kvslot.toml
    kvslotd --config kvslot.toml --socket ./kvslot.sock &
    python examples/hf.py --socket ./kvslot.sock $MODEL "What is the capital of France?" "And of Italy?"

The prompts share what the chat template puts in front, and the second run finds both.  Without a daemon it answers all
the same, and when one comes (or comes back) it uses that.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvslot import Client
from kvslot.api.wire import Disconnected, StaleSession
from kvslot.engines import fingerprint
from kvslot.engines.hf import PoolCache, Preempted


class Engine:
    """A model, and a client while there is a daemon."""

    def __init__(self, folder: str, socket: str, tenant: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.socket = socket
        self.namespace = fingerprint.namespace(self.model, tenant=tenant)  # reads all weights: once
        self.client: Client | None = None

    def answer(self, text: str, count: int) -> tuple[str, int, int]:
        """What the model says, tokens of the prompt, and how many of those were cached."""
        talk = [{"role": "user", "content": text}]
        given = self.tokenizer.apply_chat_template(
            talk, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids, mask = given["input_ids"], given["attention_mask"]
        options = {"attention_mask": mask, "max_new_tokens": count, "do_sample": False}
        while True:
            try:
                client = self.connected()
                if client is None:
                    out, hit = self.model.generate(ids, **options), 0
                else:
                    with PoolCache(client, self.model, ids, mask, wait_for_commit=True) as cache:
                        out, hit = self.model.generate(ids, cache=cache, **options), cache.hits[0]
                break
            except Preempted:
                continue  # memory was short: it waits for its turn now, and what it had computed may still be there
            except Disconnected:
                continue  # in mid-answer: again, with whatever daemon there is, or without
        return self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True), ids.shape[1], hit

    def connected(self) -> Client | None:
        """A client that has a daemon, or None where there is no daemon now."""
        try:
            if self.client is not None:
                try:
                    self.client.complete()  # nothing is under way: raises if the connection has ended
                except Disconnected:
                    self.client.reconnect()
            else:
                self.client = Client(self.socket, namespace=self.namespace)
        except StaleSession:
            self.close()  # the daemon has started anew: what was cached is gone
            return self.connected()
        except Disconnected:
            return None
        return self.client

    def close(self) -> None:
        """Ends the session."""
        if self.client is not None:
            self.client.close()
            self.client = None


def main() -> None:
    """Answers each prompt in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a model's folder")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--socket", default="", help="of kvslotd (default: the usual place)")
    parser.add_argument("--tenant", default="", help="whose cache to use")
    parser.add_argument("--tokens", type=int, default=32, help="to generate (32)")
    arguments = parser.parse_args()
    engine = Engine(arguments.model, arguments.socket, arguments.tenant)
    for prompt in arguments.prompts:
        text, count, hit = engine.answer(prompt, arguments.tokens)
        print(f"{prompt}\n  {text.strip()}\n  ({hit} of {count} tokens were cached)")
    engine.close()


if __name__ == "__main__":
    main()
