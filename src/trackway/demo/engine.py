"""A small inference engine: many requests in flight, one batch, one thread for the forward passes."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Generation:
    """What the engine sampled.

    Attributes:
        token_ids: includes the stop token.
        log_probs: natural log probability of each token under the distribution it was drawn from, that
            is after the temperature (before it where the temperature is 0).
        finish_reason: ``stop`` or ``length``.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str


@dataclass(slots=True, eq=False)
class _Request:
    prompt: list[int]
    max_tokens: int
    temperature: float
    stop_ids: frozenset[int]
    generator: Any
    future: asyncio.Future[Generation]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    @property
    def stopped(self) -> bool:
        return self.tokens[-1] in self.stop_ids

    @property
    def ended(self) -> bool:
        return self.stopped or len(self.tokens) >= self.max_tokens or self.future.cancelled()


class Engine:
    """Continuous batching with a KV cache: a request joins the batch when it comes, leaves when it ends.

    Used as ``async with Engine(model) as engine``. All prompts that wait are prefilled together; what they
    have in common is computed once and kept for the next ones.

    Every request draws from a generator of its own, so neither the order of requests nor their neighbours
    decide what is sampled. They still move the last bits of the logits (matrix products of another shape
    round otherwise), so on rare occasions a token that sat on the edge falls to the other side.
    """

    def __init__(self, model: Any) -> None:
        import torch

        self._model = model
        # One core: torch's threads wait for each other at every layer, so that two of them on two cores
        # are slower by an order of magnitude as soon as anything else runs (the sync process does).
        self._thread = ThreadPoolExecutor(1, "demo-engine", initializer=torch.set_num_threads, initargs=(1,))
        self._waiting: asyncio.Queue[_Request] = asyncio.Queue()
        self._server: asyncio.Task[None] | None = None
        self._running: list[_Request] = []
        self._cache: Any = None  # keys and values of the running requests
        self._mask: Any = None  # int64 [requests, cached positions], 0 where a position is padding
        self._prefix: list[int] = []
        self._prefix_cache: list[tuple[Any, Any]] = []

    async def __aenter__(self) -> Engine:
        self._server = asyncio.create_task(self._serve())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server:
            self._server.cancel()
            await asyncio.gather(self._server, return_exceptions=True)
        self._thread.shutdown()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        stop_ids: Collection[int],
        seed: int,
    ) -> Generation:
        """Sample up to ``max_tokens`` tokens, at temperature 0 the likeliest ones.

        Raises:
            ValueError: the prompt is empty, or a number is out of range.
        """
        import torch

        if not prompt_ids or max_tokens < 1 or temperature < 0:
            raise ValueError(
                f"generate needs at least one prompt id, max_tokens >= 1 and temperature >= 0; "
                f"got {len(prompt_ids)} ids, max_tokens={max_tokens}, temperature={temperature}"
            )
        request = _Request(
            prompt=list(prompt_ids),
            max_tokens=max_tokens,
            temperature=temperature,
            stop_ids=frozenset(stop_ids),
            generator=torch.Generator().manual_seed(seed),
            future=asyncio.get_running_loop().create_future(),
        )
        self._waiting.put_nowait(request)
        return await request.future

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            arrived = [] if self._running else [await self._waiting.get()]
            while not self._waiting.empty():
                arrived.append(self._waiting.get_nowait())
            try:
                finished = await loop.run_in_executor(self._thread, self._step, arrived)
            except Exception as error:
                for request in {*self._running, *arrived}:
                    if not request.future.done():
                        request.future.set_exception(error)
                self._running = []
                continue
            for request in finished:
                if not request.future.done():
                    reason = "stop" if request.stopped else "length"
                    request.future.set_result(Generation(request.tokens, request.log_probs, reason))

    def _step(self, arrived: list[_Request]) -> list[_Request]:
        """Prefill those who arrived, else add one token to every running request; return who is finished."""
        import torch

        with torch.inference_mode():
            if arrived:
                logits, cache, mask = self._prefill([request.prompt for request in arrived])
                self._join(arrived, cache, mask)
                self._sample(arrived, logits)
            else:
                last = torch.tensor([[request.tokens[-1]] for request in self._running])
                self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
                self._sample(self._running, self._forward(last, self._mask, self._cache))
            return self._leave()

    def _forward(self, ids: Any, mask: Any, cache: Any) -> Any:
        """Return float32 [requests, vocabulary], the logits after the last of ``ids``."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        # By position: the fourth is called past_key_values or cache, as the version of transformers has it.
        return self._model(ids, mask, positions, cache, use_cache=True, logits_to_keep=1).logits[:, -1]

    def _prefill(self, prompts: list[list[int]]) -> tuple[Any, Any, Any]:
        import torch

        shared = _common_prefix([*prompts, self._prefix])
        if 2 * shared < min(map(len, prompts)):
            shared = _common_prefix(prompts)
            cache = _new_cache()
            if shared:
                ids = torch.tensor([prompts[0][:shared]])
                self._forward(ids, torch.ones_like(ids), cache)
            self._prefix, self._prefix_cache = prompts[0][:shared], _layers(cache)
        shared = min(shared, *(len(prompt) - 1 for prompt in prompts))  # each keeps one token to compute

        rest = [prompt[shared:] for prompt in prompts]
        width = max(map(len, rest))
        ids = torch.tensor([[0] * (width - len(own)) + own for own in rest])
        mask = torch.tensor([[1] * shared + [0] * (width - len(own)) + [1] * len(own) for own in rest])
        kept = [
            tuple(tensor[:, :, :shared].expand(len(rest), -1, -1, -1) for tensor in layer)
            for layer in self._prefix_cache
        ]
        cache = _new_cache(kept if shared else ())
        return self._forward(ids, mask, cache), cache, mask

    def _join(self, arrived: list[_Request], cache: Any, mask: Any) -> None:
        import torch

        if self._running:
            width = max(self._mask.shape[1], mask.shape[1])
            before, after = width - self._mask.shape[1], width - mask.shape[1]
            pairs = zip(_padded(_layers(self._cache), before), _padded(_layers(cache), after), strict=True)
            cache = _new_cache(
                [
                    (torch.cat([keys, new_keys]), torch.cat([values, new_values]))
                    for (keys, values), (new_keys, new_values) in pairs
                ]
            )
            pad = torch.nn.functional.pad
            mask = torch.cat([pad(self._mask, (before, 0)), pad(mask, (after, 0))])
        self._running = self._running + arrived
        self._cache, self._mask = cache, mask

    def _leave(self) -> list[_Request]:
        import torch

        ended = [request.ended for request in self._running]
        finished = [request for request, end in zip(self._running, ended, strict=True) if end]
        if finished:
            stay = [row for row, end in enumerate(ended) if not end]
            self._running = [self._running[row] for row in stay]
            rows = torch.tensor(stay, dtype=torch.long)
            mask = self._mask[rows]
            start = int(mask.any(0).int().argmax()) if stay else 0  # padding that nobody needs any more
            self._mask = mask[:, start:]
            layers = [
                (keys[rows, :, start:], values[rows, :, start:]) for keys, values in _layers(self._cache)
            ]
            self._cache = _new_cache(layers if stay else ())
        return finished

    def _sample(self, requests: list[_Request], logits: Any) -> None:
        import torch

        scale = torch.tensor([[request.temperature or 1.0] for request in requests])
        log_probs = torch.log_softmax(logits.float() / scale, dim=-1)
        for request, row in zip(requests, log_probs, strict=True):
            if request.temperature:
                token = int(torch.multinomial(row.exp(), 1, generator=request.generator))
            else:
                token = int(row.argmax())
            request.tokens.append(token)
            request.log_probs.append(float(row[token]))


def _common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    for length, column in enumerate(zip(*sequences, strict=False)):
        if len(set(column)) > 1:
            return length
    return min(map(len, sequences))


def _new_cache(layers: Sequence[Any] = ()) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache()
    for number, (keys, values) in enumerate(layers):
        cache.update(keys, values, number)
    return cache


def _layers(cache: Any) -> list[tuple[Any, Any]]:
    return [(layer.keys, layer.values) for layer in cache.layers]


def _padded(layers: Sequence[tuple[Any, Any]], count: int) -> list[tuple[Any, Any]]:
    from torch.nn.functional import pad

    return [(pad(keys, (0, 0, count, 0)), pad(values, (0, 0, count, 0))) for keys, values in layers]
