"""How nbgrader runs a submission: the nbgrader_config.py of `make course` names AUTOGRADE.

nbgrader by itself fails a whole submission when a cell ends its kernel or cannot be interrupted, awards the points of a
check that was not run, and denies them to a check that passes with a warning.
"""

import copy
from pathlib import Path

from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat.v4 import new_output
from nbgrader.converters import Autograde
from nbgrader.preprocessors import Execute
from nbgrader.utils import is_grade
from traitlets import List, default

from course_kit.local_kernel import LocalKernelManager

PROJECT = Path(__file__).resolve().parents[2]
BESIDE = "data", "benchmarks"  # a notebook reads ../data and ../benchmarks
MOST_KERNELS = 10


class RunEveryCell(Execute):
    """A cell that ends its kernel fails; a new kernel runs the cells above it again, and continues below it."""

    # These two end a kernel a moment later, in the middle of another cell.
    extra_arguments = List(["--IPKernelApp.exec_lines=del exit, quit"]).tag(config=True)

    @default("kernel_manager_class")
    def local_kernel(self) -> type:
        return LocalKernelManager

    def preprocess(self, nb, resources):
        self.fatal, self.kernels = set(), 1
        beside = Path(resources["metadata"]["path"]).resolve().parent
        for name in BESIDE:
            if not (beside / name).exists():
                (beside / name).unlink(missing_ok=True)  # a link to where this project was
                (beside / name).symlink_to(PROJECT / name)
        for cell in filter(is_grade, nb.cells):  # no learner's tag leaves a check out
            cell.metadata.tags = [tag for tag in cell.metadata.get("tags", []) if tag != self.skip_cells_with_tag]
        nb, resources = super().preprocess(nb, resources)
        for cell in filter(is_grade, nb.cells):
            settle(cell)
        return nb, resources

    def preprocess_cell(self, cell, resources, index):
        if self.kernels > MOST_KERNELS:
            return cell, resources
        try:
            return super().preprocess_cell(cell, resources, index)
        except (DeadKernelError, CellTimeoutError) as error:
            self.log.warning("Cell %s ended its kernel: %s", cell.get("id", index), error)
        cell.outputs = [failure("the kernel died in this cell, or could not be interrupted")]
        self.fatal.add(index)
        while self.kernels <= MOST_KERNELS and not self.new_kernel_comes_to(index, resources):
            pass
        return cell, resources

    def new_kernel_comes_to(self, index: int, resources) -> bool:
        """Return whether a new kernel has run copies of all cells above one, but for those that have ended a kernel."""
        self.kernels += 1
        self._cleanup_kernel()
        self.create_kernel_manager()
        self.start_new_kernel()
        self.start_new_kernel_client()
        for number, cell in enumerate(self.nb.cells[:index]):
            if number not in self.fatal:
                try:
                    super().preprocess_cell(copy.deepcopy(cell), resources, number)
                except (DeadKernelError, CellTimeoutError):
                    self.fatal.add(number)
                    return False
        return True


def failure(reason: str):
    """Return the output of a cell that fails for this reason."""
    return new_output("error", ename="NotGraded", evalue=reason, traceback=[reason])


def settle(cell) -> None:
    """Give a check the outputs that tell nbgrader its result: a warning is no failure, a skipped cell is one."""
    if cell.cell_type != "code":
        return
    if cell.execution_count is None and not cell.outputs:
        cell.outputs = [failure("this cell was not run")]
    for output in cell.outputs:
        if output.output_type == "stream":
            output.name = "stdout"


AUTOGRADE = [RunEveryCell if step is Execute else step for step in Autograde.autograde_preprocessors.default()]
