"""An answer does in the library what it does in the text that it is spliced into, and leaves nothing of it behind.

The module is made up. Each answer is installed in it, and spliced into its text, which is then imported.
"""

import functools
import importlib.util
import inspect
import sys
import types

import pytest

import course_lib
from course_kit.exercises import install as installing
from course_kit.exercises.cells import CellError, read
from course_kit.exercises.install import Answer, install, installed, sync, uninstall
from course_kit.exercises.splice import splice

NAME, CLASSES = "course_lib.made_up.module", "#| export made_up.module:Counter\n"
FUNCTIONS = "#| export made_up.module\n"
TEXT = '''"""A module."""

from __future__ import annotations

import contextlib
import functools
import os

import torch.nn.functional as F

TWO = 2


def double(number):
    """Twice a number."""
    return TWO * number


@functools.lru_cache
def quadruple(number):
    return 4 * number


@contextlib.contextmanager
def opened(number):
    yield number


KEPT = {"double": double, "quadruple": quadruple}


class Base:
    def name(self):
        return "Base"


class Counter(Base):
    def name(self):
        return "Counter"

    def add(self):
        return 1

    @staticmethod
    def zero():
        return 0


def after(number):
    return number + 100
'''


def module_of(text: str, folder, name: str = NAME) -> types.ModuleType:
    """Return a module with this text."""
    file = folder / f"module_{len([*folder.iterdir()])}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def made_up(tmp_path, monkeypatch):
    """The module, as one of the library."""
    module = module_of(TEXT, tmp_path)
    package = types.ModuleType("course_lib.made_up")
    monkeypatch.setattr(course_lib, "made_up", package, raising=False)
    monkeypatch.setitem(sys.modules, "course_lib.made_up", package)
    monkeypatch.setitem(sys.modules, NAME, module)
    yield module
    for answer in installed():
        uninstall(answer.exercise)


def snapshot(module: types.ModuleType) -> dict:
    """Return the objects of a module, and what lies in them."""
    found = {name: value for name, value in vars(module).items() if name != "__builtins__"}
    for name, value in list(found.items()):
        function = inspect.unwrap(value) if callable(value) else None
        if inspect.isfunction(function):
            parts = "__code__", "__defaults__", "__kwdefaults__", "__doc__", "__annotations__"
            found[name, "function"] = [getattr(function, part) for part in parts], dict(vars(function))
        if inspect.isclass(value):
            found[name, "class"] = dict(vars(value)), value.__bases__
    return found


def put(*sources: str, exercise: str = "91.1") -> None:
    install(Answer(exercise, tuple((source, f"<{exercise}, {number}>") for number, source in enumerate(sources))))


CALLS = "def call(function):\n    def inner(*args):\n        return 'call', function(*args)\n\n    return inner\n\n\n"
ANSWERS = {
    "a decorator where the library has none": (
        FUNCTIONS + CALLS + "@call\ndef double(number):\n    return number\n",
        "module.double(3), module.KEPT['double'](3)",
    ),
    "no decorator where the library has one": (
        FUNCTIONS + "def quadruple(number):\n    return number\n",
        "module.quadruple(3), module.KEPT['quadruple'](3)",
    ),
    "a cache of another size": (
        FUNCTIONS + "@functools.lru_cache(maxsize=3)\ndef quadruple(number):\n    return number\n",
        "module.quadruple(3), module.KEPT['quadruple'](3), module.quadruple.cache_parameters()['maxsize']",
    ),
    "a class for a context manager": (
        FUNCTIONS + "class opened(contextlib.nullcontext):\n    pass\n",
        "module.opened(3).__enter__()",
    ),
    "a docstring and annotations": (
        FUNCTIONS + 'def double(number: int) -> int:\n    """Mine."""\n    return number\n',
        "module.double.__doc__, module.double.__annotations__",
    ),
    "a global of its own": (
        FUNCTIONS + "def double(number):\n    global seen\n    seen = number\n    return seen\n",
        "module.double(3), module.seen",
    ),
    "a global of the library's": (
        FUNCTIONS + "def double(number):\n    global TWO\n    TWO += number\n    return TWO\n",
        "module.double(3)",
    ),
    "an attribute of the function": (
        FUNCTIONS + "def double(number):\n    double.seen = number\n    return double.seen\n",
        "module.double(3)",
    ),
    "a name bound on the way": (
        FUNCTIONS + "STEP = (HALF := 3) + 1\n\n\ndef double(number):\n    return STEP + HALF\n",
        "module.double(3)",
    ),
    "an annotated constant": (
        FUNCTIONS + "STEP: int = 3\n\n\ndef double(number):\n    return STEP\n",
        "module.double(3)",
    ),
    "an import that the library has in part": (
        FUNCTIONS + "import os, operator\n\n\ndef double(number):\n    return operator.add(number, len(os.sep))\n",
        "module.double(3)",
    ),
    "an import written in another way": (
        FUNCTIONS + "import os.path\nfrom torch.nn import functional as F\n\n\ndef double(number):\n"
        "    return os.path.basename('a/b'), F.__name__\n",
        "module.double(3)",
    ),
    "a decorator that hides a method with super()": (
        CLASSES + CALLS + "@call\ndef name(self: Counter):\n    return super().name(), __class__ is Counter\n",
        "module.Counter().name()",
    ),
    "the same in a whole class": (
        FUNCTIONS + CALLS + "class Counter(Base):\n    @call\n    def name(self):\n"
        "        return super().name(), __class__ is Counter\n",
        "module.Counter().name()",
    ),
    "a whole class with one base more": (
        FUNCTIONS + "class More:\n    def more(self):\n        return 4\n\n\nclass Counter(Base, More):\n    pass\n",
        "module.Counter().more(), module.Counter().name()",
    ),
    "a method with a text of several lines": (
        CLASSES + "def name(self: Counter):\n    n = 3\n"
        "    return '''a\nb'''\\\n    f'''{n}\n{\n    n}\nc''' 'd\\\ne'\n",
        "module.Counter().name()",
    ),
    "a new method with a text of several lines": (
        CLASSES + "def add(self: Counter):\n    return self.text()\n\n\ndef text(self):\n    return '''a\n\nb'''\n",
        "module.Counter().add()",
    ),
    "a decorated helper of methods": (
        CLASSES + "@functools.cache\ndef plan(number):\n    return number\n\n\n"
        "def add(self: Counter):\n    return plan(3)\n",
        "module.Counter().add()",
    ),
    "a private method": (
        CLASSES + "def __plan(self):\n    return 3\n\n\ndef add(self: Counter):\n    return self.__plan()\n",
        "module.Counter().add()",
    ),
    "a method that was static": (CLASSES + "def zero():\n    return 3\n", "module.Counter.zero()"),
}  # fmt: skip


def result(module: types.ModuleType, expression: str) -> object:
    return repr(eval(expression, {"module": module}))


@pytest.mark.parametrize("source, expression", ANSWERS.values(), ids=ANSWERS)
def test_installed_and_spliced_are_the_same_and_leave_nothing(source, expression, made_up, tmp_path):
    before = snapshot(made_up)
    spliced = module_of(splice(TEXT, read(source, "ex-91-1"), "exercise 91.1 (yours)", learners=True), tmp_path)
    put(source)
    assert result(made_up, expression) == result(spliced, expression)
    uninstall("91.1")
    assert snapshot(made_up) == before


@pytest.mark.skipif(sys.version_info < (3, 12), reason="there are no type parameters yet")
def test_a_function_with_type_parameters(made_up, tmp_path):
    source = FUNCTIONS + "def double[T](number: T):\n    return T.__name__\n"
    test_installed_and_spliced_are_the_same_and_leave_nothing(source, "module.double(3)", made_up, tmp_path)
    put(source)
    assert made_up.KEPT["double"](3) == "T"


@pytest.mark.parametrize(
    "source, words",
    [
        (FUNCTIONS + "STEP = after(1)\n\n\ndef double(n):\n    return STEP\n", "line 2: .* defines after further down"),
        (FUNCTIONS + "def double(number, more=KEPT):\n    return more\n", "line 2: .* defines KEPT further down"),
        (FUNCTIONS + "STEP = [after(n) for n in (1, 2)]\ndef double(n):\n    return STEP\n", "defines after further"),
        (FUNCTIONS + "class Mine(Counter):\n    pass\ndef double(n):\n    return Mine()\n", "defines Counter further"),
        (FUNCTIONS + "def double(number):\n    return STEP\n\n\nSTEP = double(1)\n", "line 6: .* double further"),
        (CLASSES + "def add(self: Counter, more=Counter.zero):\n    return more\n", "defines Counter further down"),
        (FUNCTIONS + "class Counter(Base):\n    __slots__ = ()\n", "or __slots__"),
        (FUNCTIONS + "import abc\nclass Counter(Base, metaclass=abc.ABCMeta):\n    pass\n", "another metaclass"),
    ],
    ids=range(8),
)  # fmt: skip
def test_what_the_text_of_the_module_could_not_do_is_refused(source, words, made_up):
    before = snapshot(made_up)
    with pytest.raises(CellError, match=words):
        put(source)
    assert snapshot(made_up) == before and not installed()


def test_what_is_used_later_may_stand_further_down(made_up):
    put(FUNCTIONS + "STEP = lambda: after(1)\n\n\ndef double(number):\n    return STEP(), [after(n) for n in (1, 2)]\n")
    assert made_up.double(3) == (101, [101, 102])


@pytest.mark.parametrize(
    "first, second, words",
    [
        ("STEP = 3\ndef double(n):\n    return STEP", "STEP = 3\ndef after(n):\n    return STEP", "another STEP"),
        ("class Counter(Base):\n    pass", ":Counter\ndef add(self: Counter):\n    return 5", "add, and Counter is"),
        (":Counter\ndef add(self: Counter):\n    return 5", "class Counter(Base):\n    pass", "and Counter.add is"),
    ],
    ids=["a constant", "a class, then its method", "a method, then its class"],
)  # fmt: skip
def test_what_two_answers_bring_alike_is_refused_as_in_the_text(first, second, words, made_up):
    first, second = (FUNCTIONS + each if each[0] != ":" else FUNCTIONS[:-1] + each for each in (first, second))
    put(first)
    with pytest.raises(CellError, match=words):
        put(second, exercise="91.2")
    assert [each.exercise for each in installed()] == ["91.1"]
    uninstall("91.1")
    assert not installing._replaced and not any(installing._added.values())


def test_an_import_that_two_answers_bring_stands_above_both(tmp_path):
    low = FUNCTIONS + "import operator\n\n\ndef after(n):\n    return operator.add(n, 1)\n"
    high = FUNCTIONS + "import operator\n\nADD = operator.add\n\n\ndef double(n):\n    return ADD(n, n)\n"
    text = splice(TEXT, read(low, "ex-91-1"), "exercise 91.1 (yours)", learners=True)
    module = module_of(splice(text, read(high, "ex-91-2"), "exercise 91.2 (yours)", learners=True), tmp_path)
    assert (module.double(3), module.after(3)) == (6, 4)


@pytest.mark.parametrize(
    "body",
    [
        "    with install.without('91.1'):\n        return double(number)\n",
        "    install.uninstall('91.1')\n    return double(number)\n",
    ],
    ids=["without", "uninstall"],
)
def test_an_answer_does_not_get_the_reference_by_asking_for_it(body, made_up):
    """The notebook may ask, also in the cell of the answer."""
    source = FUNCTIONS + "from course_kit.exercises import install\n\n\ndef double(number):\n" + body
    put(source)
    with pytest.raises(AssertionError, match="asks for the reference"):
        made_up.double(3)
    assert [each.exercise for each in installed()] == ["91.1"]
    trial = "with install.without('91.1'):\n    seen = module.double(3)\n"
    space = {"install": installing, "module": made_up, "__name__": "__main__"}
    exec(compile(trial, "<91.1, 0>", "exec"), space)
    assert space["seen"] == 6


def test_ranks_install_in_the_order_of_the_list():
    answers = [Answer(f"91.{n}", ((FUNCTIONS + f"import operator\ndef {name}(n):\n    return operator\n", name),))
               for n, name in enumerate(("double", "quadruple", "after"))]  # fmt: skip
    for order in (answers, answers[::-1]):
        sync([])
        sync(order)
        assert installed() == order


def test_answers_come_and_go_in_any_order(made_up):
    """After each step the module does what a fresh one does with the same answers, and in the end nothing is left."""
    import random

    sources = {
        "91.1": FUNCTIONS + "import operator\n\n\ndef double(number):\n    return operator.add(number, 7)\n",
        "91.2": FUNCTIONS + "import operator\n@functools.cache\ndef after(n):\n    return operator.sub(double(n), 1)\n",
        "91.3": CLASSES + "def add(self: Counter):\n    return double(1), super().name()\n",
        "91.4": CLASSES + "@staticmethod\ndef zero():\n    global TWO\n    return after(2)\n",
        "91.5": FUNCTIONS + "@functools.lru_cache(2)\ndef quadruple(n):\n    return Counter.zero()\n",
    }  # fmt: skip
    probe = "module.double(4), module.KEPT['double'](5), module.after(1), module.Counter().add(), "
    probe += "module.Counter.zero(), module.quadruple(3)"
    answers = {name: Answer(name, ((source, f"<{name}>"),)) for name, source in sources.items()}
    before = snapshot(made_up)

    @functools.cache
    def fresh(names: frozenset) -> str:
        sync([])
        for name in sorted(names):
            install(answers[name])
        return result(made_up, probe)

    for seed in range(40):
        chance = random.Random(seed)
        sync([])
        for _ in range(8):
            name, now = chance.choice([*answers]), [each.exercise for each in installed()]
            match chance.choice(["install", "uninstall", "sync", "without"]):
                case "install":
                    install(answers[name])
                case "uninstall":
                    uninstall(name)
                case "sync":
                    sync([answers[each] for each in chance.sample([*answers], 3)])
                case "without":
                    with installing.without(name):
                        assert name not in [each.exercise for each in installed()]
                    assert {each.exercise for each in installed()} == {*now}
            names = [each.exercise for each in installed()]
            seen = result(made_up, probe)
            assert seen == fresh(frozenset(names)), (seed, names)
            sync([answers[each] for each in names])
    sync([])
    assert snapshot(made_up) == before
