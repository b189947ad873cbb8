"""Watch an answer in a check of notebook 04: when all-reduces start, its waits, and its writes to tensors in flight."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_kit.typed import override, transformer_blocks
from course_lib.collectives.traffic import Traffic, count_traffic


class Watched(count_traffic):
    """Count traffic; how many all-reduces had started when backward reached each block (seen); how often an answer
    waited for one (waits), asked for its future (futures), or wrote into a tensor that was in flight (touched).
    """

    def __enter__(self) -> Traffic:
        self.waits, self.futures, self.touched = 0, 0, 0
        self.in_flight: dict[int, torch.Tensor] = {}
        self.methods = dist.Work.wait, dist.Work.get_future

        def wait(work: dist.Work, *args) -> bool:
            self.waits += 1
            return self.methods[0](work, *args)

        def get_future(work: dist.Work) -> torch.futures.Future:
            self.futures += 1
            return self.methods[1](work)

        override(dist.Work, wait=wait, get_future=get_future)
        return super().__enter__()

    def __exit__(self, *error):
        wait, get_future = self.methods
        override(dist.Work, wait=wait, get_future=get_future)
        return super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: tuple, args: tuple = (), kwargs: dict | None = None):
        for argument, value in zip(function._schema.arguments, args, strict=False) if self.in_flight else ():
            if isinstance(value, torch.Tensor) and argument.alias_info is not None and argument.alias_info.is_write:
                self.touched += value.untyped_storage().data_ptr() in self.in_flight
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if function.namespace == "c10d":
            self.in_flight |= {tensor.untyped_storage().data_ptr(): tensor for tensor in args[0]}
        return result

    def blocks(self, model: nn.Module) -> Watched:
        """Note for each block how many all-reduces have started when backward reaches it; return self."""
        self.seen: list[int] = []
        for block in transformer_blocks(model):
            block.mlp_norm.register_full_backward_pre_hook(lambda *_: self.seen.append(self.traffic.calls))
        return self


class Largest(count_traffic):
    """Count traffic, and the bytes of the largest tensor that an operator has made."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: tuple, args: tuple = (), kwargs: dict | None = None):
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.largest = max(self.largest, result.nbytes if isinstance(result, torch.Tensor) else 0)
        return result
