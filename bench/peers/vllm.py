"""vLLM on a CPU, with its prefix cache: every question is a request with the whole prompt.

Runs in vLLM's environment: imports only that and the standard library.
"""

import os
from itertools import chain, count
from typing import Any

from bench.peers.contestant import Clock
from bench.peers.protocol import Answered, Ask, Opening, Record

_CACHE_GIB = "2"
_SEQUENCES = 16
_BATCH_TOKENS = 2048
_BLOCK = 32
"""Tokens; the fewest that vLLM recommends on a CPU. A question computes a block again that was not full."""


class Resent:
    """An update is only remembered; the next question finds the prompt's first part in the prefix cache."""

    def open(self, opening: Opening) -> str:
        """Start the engine; its worker threads get the first cores that this process may use."""
        cores = sorted(os.sched_getaffinity(0))[: opening.threads]
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE=_CACHE_GIB,
            VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)),
            VLLM_LOGGING_LEVEL="WARNING",
            VLLM_NO_USAGE_STATS="1",
            HF_HUB_OFFLINE="1",
        )
        import torch
        import vllm  # reads the variables

        llm = vllm.LLM(
            model=opening.model,
            dtype=opening.dtype,
            skip_tokenizer_init=True,
            max_model_len=opening.tokens + opening.question,
            enable_prefix_caching=True,
            block_size=_BLOCK,
            enforce_eager=True,
            max_num_seqs=_SEQUENCES,
            max_num_batched_tokens=_BATCH_TOKENS,
        )
        self._engine: Any = llm.llm_engine
        self._parameters = vllm.SamplingParams
        self._prompts = [list(opening.frozen) for _ in range(opening.sessions)]
        self._numbers = count()
        return f"vllm {vllm.__version__}, torch {torch.__version__}"

    def read(self, records: list[list[Record]]) -> bool:
        """Remember the bars."""
        for prompt, own in zip(self._prompts, records, strict=True):
            prompt.extend(chain.from_iterable(own))
        return False

    def ask(self, ask: Ask) -> Answered:
        """All questions are requests at the same time."""
        prompts = [self._prompts[session] + question for session, question in ask.questions]
        clock = Clock()
        return clock.answered(self._generate(prompts, ask.tokens, clock))

    def _generate(self, prompts: list[list[int]], tokens: int, clock: Clock) -> list[list[int]]:
        """Greedy answers of ``tokens`` tokens."""
        parameters = self._parameters(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        names = [str(next(self._numbers)) for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
        answers: dict[str, list[int]] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)
            if len(answers) == len(names):
                clock.first()
        return [answers[name] for name in names]


class Warmed(Resent):
    """The prompt is sent when an update comes, for one token, so that questions find it in the cache."""

    def read(self, records: list[list[Record]]) -> bool:
        """All sessions are requests at the same time."""
        super().read(records)
        self._generate([list(prompt) for prompt in self._prompts], 1, Clock())
        return True
