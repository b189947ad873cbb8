"""How the check of an exercise answered an answer, and what is wrong with that."""

import re
from dataclasses import dataclass


@dataclass
class Failure:
    """How a cell failed."""

    is_verdict: bool  # an assertion of the check's own, or its deadline
    is_advice: bool  # an assertion, whatever lies behind it
    kind: str  # the type of the error, or of the one behind it
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message.splitlines()[0] if self.message else 'without a message'}"

    def words(self) -> int:
        """How many words the message has, the exercise's name left out."""
        return len(re.findall(r"\w+", re.sub(r"^Exercise \d\d\.\d+", "", self.message)))


def failure_of(error: BaseException) -> Failure:
    """What an error says. `check` raises an AssertionError of its own kind for every error; where the one behind it is
    no assertion, the answer crashed and the check only reported it. A timeout is a verdict too: the check's deadline
    caught an answer that hangs, and where each rank waits is the advice.
    """
    behind = None if type(error) is AssertionError else error.__cause__ or error.__context__
    is_advice = isinstance(error, AssertionError)
    is_verdict = is_advice and isinstance(behind or error, (AssertionError, TimeoutError))
    return Failure(is_verdict, is_advice, type(behind if is_advice and behind else error).__name__, str(error))


def blank_faults(failure: Failure | None) -> list[str]:
    """What is wrong with how a check answers a blank exercise."""
    if failure is None:
        return ["its check passes while it is blank"]
    if not failure.is_advice:
        return [f"blank, its check shows a bare error instead of advice: {failure}"]
    return [] if failure.words() >= 4 else [f"blank, its check does not say what to do: '{failure.message}'"]


def answer_faults(what: str, failure: Failure | None) -> list[str]:
    """What is wrong with how a check answers a wrong answer. One that writes to memory which is gone "may crash": the
    report of the rank's death is a verdict then.
    """
    if failure is None:
        return [f"its check accepts the wrong answer '{what}'"]
    if not failure.is_verdict and not ("may crash" in what and "SIG" in failure.message):
        return [f"the wrong answer '{what}' crashes instead of being caught: {failure}"]
    if failure.words() < 4:
        return [f"its check does not explain what is wrong with '{what}': '{failure.message}'"]
    return []
