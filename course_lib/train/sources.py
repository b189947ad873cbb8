"""The sources of text that a run's settings name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from course_lib.single_gpu.data import digest, library_files
from course_lib.single_gpu.documents import open_documents
from course_lib.train.sections import Data, Settings
from course_lib.train.settings import SettingsError, checked, did_you_mean, keys, of_type, shown


@dataclass
class Source:
    """One data set, as [data] or a table [[data.sources]] describes it. weight: its share of the sequences, among the
    weights of all sources. Without a dataset, each file of the Python standard library's source that is not empty is a
    document.
    """

    dataset: str | None
    column: str
    split: str
    subset: str | None
    documents: int | None
    token_dtype: str
    end_token: int | None
    weight: float | None = None

    @property
    def name(self) -> str:
        """The name in messages."""
        return self.dataset or "the Python standard library"

    @property
    def is_local(self) -> bool:
        """True if the source is on this machine: to count its documents costs no download."""
        return self.dataset is None or Path(self.dataset).exists()

    def rows(self) -> tuple[Iterator[tuple[str, object]], list[str]]:
        """Return the position and the value of each row of a source of text, and notes: see open_documents."""
        if self.dataset is None:
            files = (file for file in library_files() if file.stat().st_size)
            return ((str(file), file.read_text(encoding="utf-8", errors="ignore")) for file in files), []
        return open_documents(self.dataset, self.split, self.subset, self.column)

    def key(self, *options: object) -> str:
        """Return a name in the cache, which changes with the files of the source and with the options."""
        files = [str(file) for file in library_files()] if self.dataset is None else [self.dataset]
        return digest(tuple(files), (self.split, self.column, self.documents, self.subset, *options))


KEYS = [each.name for each in dataclasses.fields(Source)]


def source_of(data: Data, table: dict, who: str) -> Source:
    """Return the source of a table, whose keys take precedence over those of [data]. Raises SettingsError."""
    fields = {each.name: each for section, each in keys() if section == "data"}
    values = {name: getattr(data, name) for name in KEYS if name in fields}
    for name, value in table.items():
        if name not in KEYS:
            raise SettingsError(f"{who} has no key {name}; {did_you_mean(name, KEYS)}")
        if name != "weight":
            values[name] = checked("data", fields[name], value, f"{name} in {who}")
            continue
        values[name] = of_type(value, float, f"weight in {who}")
        if not 1e-18 <= values[name] <= 1e18:  # the sums and quotients of weights are finite
            raise SettingsError(f"weight in {who} is {shown(value)}; it must be from 1e-18 to 1e18")
    return Source(**values)


def sources_of(data: Data) -> list[Source]:
    """Return the sources to train on. Raises SettingsError for a table with other keys or values."""
    if not data.sources:
        return [source_of(data, {}, "[data]")]
    sources = []
    for number, table in enumerate(data.sources, 1):
        who = f"[[data.sources]] {number}"
        sources.append(source_of(data, table, who))
        if sources[-1].dataset is None:
            raise SettingsError(f"{who} has no dataset")
    without = [source.name for source in sources if source.weight is None]
    if 0 < len(without) < len(sources):
        raise SettingsError(f"{without[0]} has no weight; write one for each of [[data.sources]], or for none")
    return sources


def held_out_source(settings: Settings) -> Source | None:
    """Return the source of the held-out text, if the settings name one and evaluate."""
    data, evaluation = settings.data, settings.evaluation
    if evaluation.eval_dataset is None or not evaluation.eval_every:
        return None
    table = {"dataset": evaluation.eval_dataset, "split": evaluation.eval_split or data.split}
    source = source_of(data, table, "[evaluation]")
    same = evaluation.eval_dataset == data.dataset
    return dataclasses.replace(source, documents=None, subset=data.subset if same else None)
