"""Watch an answer in a check of notebook 04: when all-reduces start, who waits, and what is written meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.single_gpu.model import Transformer


class Watched(count_traffic):
    """Count traffic; how many all-reduces had started when backward came to each block (seen); how often an answer
    waited for one (waits), asked for its future (futures), or wrote into a tensor that was on its way (touched).
    """

    def __enter__(self) -> Traffic:
        self.waits, self.futures, self.touched, self.sent = 0, 0, 0, {}
        self.methods = dist.Work.wait, dist.Work.get_future

        def wait(work: dist.Work, *args) -> bool:
            self.waits += 1
            return self.methods[0](work, *args)

        def get_future(work: dist.Work) -> torch.futures.Future:
            self.futures += 1
            return self.methods[1](work)

        dist.Work.wait, dist.Work.get_future = wait, get_future
        return super().__enter__()

    def __exit__(self, *error):
        dist.Work.wait, dist.Work.get_future = self.methods
        return super().__exit__(*error)

    def __torch_dispatch__(self, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):
        for argument, value in zip(function._schema.arguments, args, strict=False) if self.sent else ():
            if isinstance(value, torch.Tensor) and argument.alias_info is not None and argument.alias_info.is_write:
                self.touched += value.untyped_storage().data_ptr() in self.sent
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if function.namespace == "c10d":
            self.sent |= {tensor.untyped_storage().data_ptr(): tensor for tensor in args[0]}
        return result

    def blocks(self, model: Transformer) -> Watched:
        """Note for each block how many all-reduces have started when backward comes to it; return self."""
        self.seen = []
        for block in model.blocks:
            block.mlp_norm.register_full_backward_pre_hook(lambda *_: self.seen.append(self.traffic.calls))
        return self


class Largest(count_traffic):
    """Count traffic, and the bytes of the largest tensor that an operator has made."""

    largest = 0

    def __torch_dispatch__(self, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.largest = max(self.largest, result.nbytes if isinstance(result, torch.Tensor) else 0)
        return result
