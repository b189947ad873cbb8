"""The Triton kernels in a module that torch.compile wrote, made kernels like one's own: to read, interpret, compile.

Where there is a GPU, `torch._inductor.utils.run_and_get_code(torch.compile(f), x)` gives that module's text (the same
that `TORCH_LOGS=output_code` prints). data/inductor_*_h100.py.txt are two such texts for an H100. Each has its kernels
as strings, and the functions in them carry inductor's decorator, which tries launch configurations on the first call.
`plain_kernel` takes the decorator and the sizes off and leaves `@triton.jit`.
"""

import linecache
import re
from typing import Any

import triton
import triton.language as tl

KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''\n(.*?)'''", re.DOTALL)
SIZE = re.compile(r"^    (\w*numel) = \d+\n", re.MULTILINE)


def kernel_sources(code: str) -> dict[str, str]:
    """By name, the source of each Triton kernel of a module that inductor wrote. Raises ValueError for one without."""
    found = dict(KERNEL.findall(code))
    if not found:
        raise ValueError("there is no Triton kernel in this text: is it the code for a CPU?")
    return found


def plain_source(source: str) -> str:
    """The function of `kernel_sources`' source from `@triton.jit` on, with no size of a tensor fixed in it.

    inductor writes the number of elements into the kernel (`xnumel = 100000000`), over the argument of the same name.
    """
    return SIZE.sub("", source[source.index("@triton.jit") :])


def plain_kernel(source: str, libdevice: Any):
    """The kernel, to launch as any: kernel[grid](pointers, numbers of elements, XBLOCK=…).

    `libdevice` has the functions of NVIDIA's library that it calls: `triton.language.extra.libdevice` itself, or what
    stands for it in the interpreter, which has none.
    """
    text = plain_source(source)
    name = re.search(r"^def (\w+)", text, re.MULTILINE)[1]
    file = f"<{name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # where Triton reads it
    space = {"__name__": name, "triton": triton, "tl": tl, "libdevice": libdevice}
    exec(compile(text, file, "exec"), space)
    return space[name]
