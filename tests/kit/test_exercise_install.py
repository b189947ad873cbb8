"""course_kit.exercises.install: the library runs a learner's answer, and afterwards the reference, without a trace.

The answers here are to functions of the library that bear no owner comment: nothing here depends on which exercises
there are. Kernels are interpreted, or run on a GPU.
"""

import functools
import inspect
import traceback

import pytest
import torch
import triton
import triton.language as tl

from course_kit.exercises import install as installing
from course_kit.exercises.cells import CellError
from course_kit.exercises.install import Answer, install, installed, sync, uninstall, without
from course_lib.single_gpu import model
from course_lib.single_gpu.model import apply_rope as alias
from course_lib.tensor_parallel import regions

EXERCISE = "01.1"
TABLE = {"rope": model.apply_rope}
PARTIAL = functools.partial(model.apply_rope)


@pytest.fixture(autouse=True)
def nothing_left():
    """Each test leaves the reference behind."""
    before = snapshot()
    yield
    for answer in installed():
        uninstall(answer.exercise)
    assert snapshot() == before


def snapshot() -> dict:
    """Return the objects of the modules used here, and what lies in them."""
    found = {}
    for module in (model, regions, rounding_module()):
        for name, value in list(vars(module).items()):
            if getattr(value, "__module__", None) != module.__name__:
                continue
            found[module.__name__, name] = value
            if inspect.isfunction(value):
                found[module.__name__, name, "code"] = value.__code__, value.__defaults__, value.__kwdefaults__
            if inspect.isclass(value):
                found[module.__name__, name, "dict"] = dict(vars(value)), value.__bases__
    return found


def rounding_module():
    from course_lib.kernels import rounding

    return rounding


def answer(*sources: str) -> Answer:
    return Answer(EXERCISE, tuple((source, f"<cell {number}>") for number, source in enumerate(sources, 1)))


def put(*sources: str) -> None:
    install(answer(*sources))


MARKED = "#| export single_gpu.model\n\ndef apply_rope(x, *rest, extra=7, **options):\n    return 'mine', extra\n"


def test_a_function_follows_wherever_it_was_kept():
    reference = model.apply_rope
    put(MARKED)
    for kept in (model.apply_rope, alias, TABLE["rope"], PARTIAL, reference):
        assert kept(1) == ("mine", 7)
    assert model.apply_rope is reference, "tests of identity stay true"
    put(MARKED.replace("extra=7", "extra=8"))
    assert alias(1) == ("mine", 8) and len(installed()) == 1
    with without(EXERCISE), pytest.raises(Exception):
        alias(1)
    assert alias(1) == ("mine", 8)


def test_an_error_shows_the_cells_line():
    put(MARKED.replace("return 'mine', extra", "return 1 / 0"))
    with pytest.raises(ZeroDivisionError) as raised:
        alias(1)
    frame = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert (frame.filename, frame.lineno, frame.line) == ("<cell 1>", 4, "return 1 / 0")
    assert "return 1 / 0" in inspect.getsource(model.apply_rope)


def test_what_a_function_needs_comes_along_and_goes_again():
    put(
        "#| export single_gpu.model\nimport operator as op\nSTEP = 3\ndef plus(a):\n    return op.add(a, STEP)\n\n\n"
        "def apply_rope(x, *rest):\n    return plus(x)\n\nTRIAL = apply_rope(never_defined)\n"
    )
    assert alias(1) == 4 and model.plus(1) == 4 and not hasattr(model, "TRIAL")
    uninstall(EXERCISE)
    assert not any(hasattr(model, name) for name in ("plus", "STEP", "op"))


def test_a_method_knows_its_class():
    small = model.Transformer(model.PRESETS["debug"])
    put(
        "#| export single_gpu.model:Transformer\ndef forward(self: Transformer, *inputs, **more):\n"
        "    self.__mark = 1\n    return super().extra_repr(), __class__, self.twice(3)\n\n\n"
        "def twice(self, n):\n    return 2 * n\n"
    )
    assert small.forward(1) == ("", model.Transformer, 6)
    assert vars(small)["_Transformer__mark"] == 1
    assert model.Transformer.forward.__qualname__ == "Transformer.forward"
    uninstall(EXERCISE)
    assert not hasattr(model.Transformer, "twice")
    assert small(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 256)


FUNCTION = (
    "#| export tensor_parallel.regions\nclass CopyToGroup({base}):\n    @staticmethod\n"
    "    def forward(ctx, x, group):\n"
    "        ctx.factor = 3\n        return x.view_as(x)\n\n    @staticmethod\n    def backward(ctx, gradient):\n"
    "        return CopyToGroup.times(gradient, ctx.factor), None\n\n    @staticmethod\n    def times(a, b):\n"
    "        return a * b\n"
)


def test_a_class_changes_attribute_by_attribute_and_stays_the_same_class():
    reference, x = regions.CopyToGroup, torch.ones(2, requires_grad=True)
    bases = reference.__bases__
    put(FUNCTION.format(base="torch.autograd.Function"))
    assert regions.CopyToGroup is reference and reference.__bases__ == (torch.autograd.Function,)
    reference.apply(x, None).sum().backward()
    assert x.grad.tolist() == [3, 3]
    uninstall(EXERCISE)
    assert reference.__bases__ == bases and not hasattr(reference, "times")


@pytest.mark.parametrize(
    "source, error, words",
    [
        # Kept while the cell's text is executed, called later: for each kind another way to delegate.
        (
            "#| export single_gpu.model\nimport copy\nimport types\n"
            "ref = types.FunctionType(globals()['apply_rope'].__code__, globals())\n"
            "def apply_rope(*a): return ref(*a)\n",
            AssertionError,
            "stored under another name",
        ),
        (
            "#| export single_gpu.model\nref = globals()['apply_rope']\ndef apply_rope(*a): return ref(*a)\n",
            RecursionError,
            "recursion",
        ),
        (
            "#| export single_gpu.model\ndef apply_rope(*a, ref=globals()['apply_rope']): return ref(*a)\n",
            RecursionError,
            "recursion",
        ),
        (
            "#| export single_gpu.model\ndef apply_rope(*a):\n"
            "    from course_lib.single_gpu.model import apply_rope as r\n"
            "    return r(*a)\n",
            RecursionError,
            "recursion",
        ),
    ],
    ids=range(4),
)
def test_a_function_that_calls_the_reference_does_not_get_there(source, error, words):
    put(source)
    with pytest.raises(error, match=words):
        alias(torch.ones(1, 2, 1, 4), torch.zeros(2, 2), torch.zeros(2, 2))


@pytest.mark.parametrize("how", ["globals()['Transformer'].forward", "vars(globals()['Transformer'])['forward']"])
def test_a_method_that_calls_the_reference_does_not_get_there(how):
    put(
        f"#| export single_gpu.model:Transformer\nref = {how}\ndef forward(self: Transformer, *a, **k):\n"
        f"    return ref(self, *a, **k)\n"
    )
    with pytest.raises(AssertionError, match="forward calls the library's forward"):
        model.Transformer(model.PRESETS["debug"])(torch.zeros(1, 3, dtype=torch.long))


@pytest.mark.parametrize("how", ["{}.forward", "{}.__dict__['forward'].__func__"])
def test_a_class_that_calls_the_reference_does_not_get_there(how):
    how = how.format("globals()['CopyToGroup']")
    text = FUNCTION.format(base="torch.autograd.Function").replace("class Copy", f"ref = {how}\nclass Copy")
    put(text.replace("return x.view_as(x)", "return ref(ctx, x, group)"))
    with pytest.raises(AssertionError, match="CopyToGroup calls the library's"):
        regions.CopyToGroup.apply(torch.ones(2), None)


def test_a_class_that_derives_from_the_reference_does_not_get_there():
    with pytest.raises((CellError, TypeError)):
        put("#| export tensor_parallel.regions\nclass CopyToGroup(CopyToGroup):\n    pass\n")
    assert not installed()


def test_a_kernel_that_calls_the_reference_does_not_get_there():
    put("#| export kernels.rounding\nref = globals()['widen']\n\n\n@triton.jit\ndef widen(x):\n    return ref(x)\n")
    with pytest.raises(Exception, match="widen"):
        tripled_or_not()


@pytest.mark.parametrize(
    "source",
    [
        "#| export single_gpu.model\ndef apply_rope(x, k=1 / 0):\n    return x\n",
        "#| export single_gpu.model\ndef apply_rope(x):\n    return np.cos(x)\n",
        "#| export single_gpu.nothing\ndef apply_rope(x):\n    return x\n",
        "#| export single_gpu.model:Nothing\ndef apply_rope(self):\n    return x\n",
        "#| export single_gpu.model\ndef loss(x):\n    return x\n\n\n@missing\ndef apply_rope(x):\n    return x\n",
        "#| export tensor_parallel.regions\nclass CopyToGroup(int):\n    pass\n",
    ],
    ids=range(6),
)
def test_an_answer_that_cannot_be_installed_leaves_nothing_behind(source):
    put(MARKED)
    with pytest.raises(Exception):
        put(source)
    assert not installed(), "the reference, also where an earlier answer had passed"


def test_two_cells_are_installed_together_or_not_at_all():
    with pytest.raises(CellError):
        put(MARKED, "#| export tensor_parallel.regions\ndef nothing(): pass\n")
    assert not installed()
    put(MARKED, "#| export tensor_parallel.regions\ndef copy_to_group(x, group):\n    return 'copy'\n")
    assert alias(1)[0] == "mine" and regions.copy_to_group(1, 2) == "copy"


def test_a_rank_runs_what_the_list_says_and_nothing_else():
    sync([answer(MARKED)])
    assert alias(1) == ("mine", 7)
    sync(
        [
            answer(MARKED.replace("=7", "=8")),
            Answer("01.2", (("#| export single_gpu.model\ndef loss(a, b): return a\n", "x"),)),
        ]
    )
    assert alias(1) == ("mine", 8) and model.loss(4, 5) == 4
    sync([])
    assert not installed()


def test_two_answers_do_not_get_in_each_others_way():
    """A definition belongs to one exercise; an import may be of several, and stays until the last of them goes."""
    first = "#| export single_gpu.model\nimport operator\ndef apply_rope(a):\n    return operator.add(a, 1)\n"
    second = "#| export single_gpu.model\nimport operator\ndef loss(a, b):\n    return operator.add(a, b)\n"
    put(first)
    install(Answer("01.2", ((second, "<second>"),)))
    uninstall(EXERCISE)
    assert model.loss(1, 2) == 3
    put(first)
    uninstall("01.2")
    assert alias(1) == 2
    for more, words in (
        ("import operator\ndef apply_rope(a):\n    return a\n", "apply_rope is exercise 01.1's"),
        ("def operator(a):\n    return a\n", "your answer to 01.1 has added another operator"),
    ):
        with pytest.raises(CellError, match=words):
            install(Answer("01.2", ((second.replace("import operator\n", "") + more, "<second>"),)))
        assert alias(1) == 2 and len(installed()) == 1
    uninstall(EXERCISE)
    assert not hasattr(model, "operator") and not installing._replaced and not any(installing._added.values())


@torch.compile(backend="eager", fullgraph=True)
def compiled(x):
    return model.loss(x, x)


def test_torch_compile_sees_the_change():
    put("#| export single_gpu.model\ndef loss(a, b):\n    return a + b\n")
    assert compiled(torch.ones(1)).item() == 2
    put("#| export single_gpu.model\ndef loss(a, b):\n    return a + 2 * b\n")
    assert compiled(torch.ones(1)).item() == 3
    mlp = torch.compile(model.MLP(model.PRESETS["debug"]), backend="eager", fullgraph=True)
    x = torch.ones(1, model.PRESETS["debug"].hidden)
    whole = mlp(x)
    put("#| export single_gpu.model:MLP\ndef forward(self: MLP, x):\n    return 5 * x\n")
    assert torch.equal(mlp(x), 5 * x)
    uninstall(EXERCISE)
    assert torch.equal(mlp(x), whole)


@triton.jit
def caller(x_ptr, out_ptr):
    tl.store(out_ptr, ROUNDING.widen(tl.load(x_ptr)))


ROUNDING = rounding_module()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tripled_or_not() -> float:
    x, out = torch.ones(1, device=DEVICE), torch.zeros(1, device=DEVICE)
    kernel_of_library()[(1,)](x, out)
    return out.item()


def kernel_of_library():
    """Return a kernel in the library's namespace that calls `widen`."""
    if not hasattr(ROUNDING, "_test_caller"):
        source = "@triton.jit\ndef _test_caller(x_ptr, out_ptr):\n    tl.store(out_ptr, widen(tl.load(x_ptr)))\n"
        import linecache

        linecache.cache["<caller>"] = len(source), None, source.splitlines(True), "<caller>"
        exec(compile(source, "<caller>", "exec"), vars(ROUNDING))
    return ROUNDING._test_caller


WIDEN = "#| export kernels.rounding\n@triton.jit\ndef widen(x):\n    return 3 * x\n"


def test_a_kernel_that_ran_before_calls_the_new_function():
    assert tripled_or_not() == 1
    put(WIDEN)
    assert tripled_or_not() == 3
    put(WIDEN.replace("3 *", "4 *"))
    assert tripled_or_not() == 4
    uninstall(EXERCISE)
    assert tripled_or_not() == 1
    del ROUNDING._test_caller


def test_a_kernel_is_replaced_wherever_a_module_has_it():
    from course_lib.kernels import fused_softmax

    assert fused_softmax.widen is ROUNDING.widen
    reference = ROUNDING.widen
    put(WIDEN)
    assert fused_softmax.widen is ROUNDING.widen is not reference
    uninstall(EXERCISE)
    assert fused_softmax.widen is ROUNDING.widen is reference


def test_a_compiled_kernels_key_follows_its_callee(tmp_path):
    """Without a GPU: Triton's own key of a kernel, in a process that compiles, is another one with another callee."""
    code = (
        "import sys\nfrom course_kit.exercises.install import Answer, install, uninstall\n"
        "from course_lib.kernels import fused_softmax, rounding\n"
        "from triton.runtime.jit import JITFunction\n"
        "kernel = next(k for k in vars(fused_softmax).values() if type(k) is JITFunction and k is not rounding.widen\n"
        "              and 'widen' in k.src)\n"
        "keys = [kernel.cache_key]\n"
        f"source = {WIDEN!r}\n"
        "install(Answer('01.1', ((source, 'cell'),)))\nkeys.append(kernel.cache_key)\n"
        "uninstall('01.1')\nkeys.append(kernel.cache_key)\n"
        "assert keys[0] == keys[2] != keys[1], keys\nprint('followed')\n"
    )
    import os
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True
    )
    assert done.stdout == "followed\n", done.stderr


def test_the_bookkeeping_is_of_this_process_alone():
    assert installing._installed == {}
